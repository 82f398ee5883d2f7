"""What the commands print with: plain helpers without state, and rich consoles made only when needed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

# Columns that no line of a table has.
_UNBROKEN = 4096
# Everything below space but tab and newline, delete, and the eight-bit controls: a model's answer, or an error from
# far away, must not drive the terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return `text` without terminal control characters; tabs and newlines stay."""
    return _CONTROLS.sub("", text)


def one_line(text: str, *, limit: int = 400) -> str:
    """Return `text` as one printable line of at most `limit` characters."""
    line = " ".join(printable(text.replace("\n", " ")).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def human_size(size: float) -> str:
    """Return a number of bytes in the largest binary unit that leaves at least 1, e.g. `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def note(text: str) -> None:
    """Print a line for the person at the terminal: standard error, so that standard output stays clean for pipes."""
    print(text, file=sys.stderr, flush=True)


def console(*, to_stderr: bool = False, width: int | None = None) -> Console:
    """Return a rich console on standard output, or on standard error; `width` in columns, absent for the terminal's."""
    from rich.console import Console  # noqa: PLC0415  rich costs more than many commands need

    return Console(stderr=to_stderr, highlight=False, width=width)


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return rows under a header, columns aligned, nothing in them taken for markup."""
    from rich.table import Table  # noqa: PLC0415  as above
    from rich.text import Text  # noqa: PLC0415  as above

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its lines whole: a narrow terminal wraps them, and `grep` and `awk` see what belongs together."""
    console(width=_UNBROKEN).print(make_table(header, rows), soft_wrap=True)
