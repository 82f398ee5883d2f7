"""What a command says when it cannot do what it was asked: one line, no traceback."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    # The command ran and the answer is no: unreachable, degraded, a failed check, a refused request.
    FAILED = 1
    # The command line itself was wrong; typer uses the same number.
    USAGE = 2
    # A defect of ours.
    INTERNAL = 70
    # Stopped by Ctrl-C.
    INTERRUPTED = 130


class CliError(Exception):
    """An expected failure. `message` is one line that says what is wrong and, where there is a way, how to mend it."""

    def __init__(self, message: str, *, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
