"""A finding of the doctor, and how findings are shown. Pure but for the printing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from cli.errors import Exit
from cli.terminal import console, printable

if TYPE_CHECKING:
    from collections.abc import Sequence


class Level(StrEnum):
    """How serious a finding is: `fail` keeps the mesh from working, `warn` makes it work worse than it could."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was seen, and for anything but ok how to mend it."""

    level: Level
    subject: str
    seen: str
    mend: str = ""


def ok(subject: str, seen: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(Level.OK, subject, seen)


def warn(subject: str, seen: str, mend: str) -> Finding:
    """Return a finding that the mesh can live with."""
    return Finding(Level.WARN, subject, seen, mend)


def fail(subject: str, seen: str, mend: str) -> Finding:
    """Return a finding that the mesh cannot live with."""
    return Finding(Level.FAIL, subject, seen, mend)


def exit_code(findings: Sequence[Finding]) -> Exit:
    """Return 1 when anything fails, else 0."""
    return Exit.FAILED if any(finding.level is Level.FAIL for finding in findings) else Exit.OK


def summary(findings: Sequence[Finding]) -> str:
    """Return the closing line."""
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    problems = [f"{counts[level]} {level}" for level in (Level.FAIL, Level.WARN) if counts[level]]
    return f"{', '.join(problems)}, {counts[Level.OK]} ok" if problems else f"all {counts[Level.OK]} checks are ok"


_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print the findings, one line each, the way to mend them below."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    terminal = console()
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        terminal.print(f"{finding.level:<4}", style=_STYLES[finding.level], end="")
        terminal.print(f"  {finding.subject:<{width}}  {printable(finding.seen)}", markup=False, soft_wrap=True)
        if finding.mend:
            terminal.print(f"{'':<{width + 8}}mend: {printable(finding.mend)}", markup=False, soft_wrap=True)
    terminal.print(summary(findings))
