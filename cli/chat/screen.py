"""Shows an answer while it comes: text to standard output, what is waited for to standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from cli.chat.stream import Reasoning, Text, Waiting
from cli.terminal import printable

if TYPE_CHECKING:
    from cli.chat.stream import ChatEvent

_DIM, _PLAIN, _CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


class Screen:
    """One answer at a time. On a terminal it shows progress and reasoning, dimmed; into a pipe goes the answer alone."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._waiting = False
        self._reasoning = False
        self._last = "\n"

    def show(self, event: ChatEvent) -> None:
        """Show one event of the answer."""
        match event:
            case Waiting(what):
                self.wait(what)
            case Reasoning(text):
                self._reason(text)
            case Text(text):
                self._answer(text)

    def wait(self, what: str) -> None:
        """Show what the answer waits for, on a line that vanishes with its first piece."""
        if self._err.isatty():
            self._err.write(f"{_CLEAR_LINE}{_DIM}{printable(what)}…{_PLAIN}")
            self._err.flush()
            self._waiting = True

    def end(self) -> None:
        """End the answer, whole or not: leave the cursor at the start of a line in plain letters."""
        self._stop_waiting()
        self._stop_reasoning()
        if self._last != "\n":
            self._write("\n")

    def _answer(self, text: str) -> None:
        self._stop_waiting()
        self._stop_reasoning()
        self._write(text)

    def _reason(self, text: str) -> None:
        if not self._out.isatty():
            return
        self._stop_waiting()
        if not self._reasoning:
            self._out.write(_DIM)
            self._reasoning = True
        self._write(text)

    def _stop_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning = False
            self._out.write(_PLAIN)
            self._write("\n" if self._last == "\n" else "\n\n")

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._err.write(_CLEAR_LINE)
            self._err.flush()

    def _write(self, text: str) -> None:
        self._last = text[-1]  # first, so that a Ctrl-C in the middle still finds where the cursor will be
        # A file gets the model's very words; a terminal must not be driven by them.
        self._out.write(printable(text) if self._out.isatty() else text)
        self._out.flush()
