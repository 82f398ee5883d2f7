"""The progress of a picture on the terminal's standard error: one line that vanishes when all is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.image.reader import Preview, Step, Waiting
from cli.terminal import console, human_size

if TYPE_CHECKING:
    from types import TracebackType

    from cli.image.reader import PictureEvent


class Bar:
    """Shows events for the length of a block; nothing where standard error is no terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total}", markup=False),
            TextColumn("{task.fields[preview]}", markup=False),
            TimeElapsedColumn(),
            console=console(to_stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("waiting", total=None, preview="")

    def show(self, event: PictureEvent) -> None:
        """Show what happened."""
        match event:
            case Waiting(what):
                self._progress.update(self._task, description=what)
            case Step(phase, done, of):
                self._progress.update(self._task, description=phase, completed=done, total=of)
            case Preview(number, size, length):
                self._progress.update(self._task, preview=f"preview {number}: {size}, {human_size(length)}")

    def __enter__(self) -> Self:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress.console.is_terminal:  # else its end would be an empty line
            self._progress.stop()
