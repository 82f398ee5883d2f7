"""Writes docs/cli.md from what `--help` says: `python -m cli.reference`, or with `--check` only says whether it drifted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from typer.testing import CliRunner

from cli.errors import Exit
from cli.main import app

TARGET: Final = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
_COMMANDS: Final = (
    (),
    ("status",),
    ("chat",),
    ("image",),
    ("models",),
    ("models", "list"),
    ("models", "load"),
    ("models", "unload"),
    ("models", "swap"),
    ("models", "pull"),
    ("keys",),
    ("keys", "create"),
    ("keys", "list"),
    ("keys", "revoke"),
    ("vram",),
    ("lease",),
    ("doctor",),
)
_HEAD: Final = """\
# The `omniserve` command

Generated from `--help` by `python -m cli.reference`; do not edit.

| exit status | meaning |
| --- | --- |
"""
_MEANINGS: Final = {
    Exit.OK: "done",
    Exit.FAILED: "the answer is no: unreachable, degraded, refused, a failed check",
    Exit.USAGE: "the command line or a setting is wrong",
    Exit.INTERNAL: "a defect of the command itself; `--debug` shows where",
    Exit.INTERRUPTED: "stopped by Ctrl-C",
}


def reference() -> str:
    """Return the whole page."""
    rows = [f"| {code.value} | {meaning} |" for code, meaning in _MEANINGS.items()]
    return "\n".join([_HEAD + "\n".join(rows), *(_section(command) for command in _COMMANDS)])


def _section(command: tuple[str, ...]) -> str:
    name = " ".join(("omniserve", *command))
    # The width is fixed, so that the page does not depend on the terminal that wrote it.
    shown = CliRunner().invoke(
        app, [*command, "--help"], prog_name="omniserve", env={"COLUMNS": "100"}, terminal_width=100
    )
    if shown.exit_code != 0:
        raise RuntimeError(f"`{name} --help` failed: {shown.output}")
    return f"\n## {name}\n\n```\n{shown.output.strip()}\n```\n"


def main() -> int:
    """Write the page, or check it; return the exit status."""
    page = reference()
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == page:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{TARGET} has drifted from --help: run python -m cli.reference", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
