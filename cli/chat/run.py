"""Decides how `omniserve chat` was meant: one prompt, a pipe, or a conversation."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from cli.chat.client import ChatClient
from cli.chat.conversation import Conversation
from cli.chat.screen import Screen
from cli.chat.turn import Turn
from cli.errors import CliError, Exit

if TYPE_CHECKING:
    from cli.chat.client import ChatOptions
    from cli.settings import CliSettings


def run(
    prompt: str | None, *, system: str | None, options: ChatOptions, url: str, stats: bool, settings: CliSettings
) -> None:
    """Answer a prompt given as an argument or through a pipe, or converse on a terminal. Raises CliError."""
    text = full_prompt(prompt, _piped())
    if text is None and not sys.stdin.isatty():
        raise CliError("no prompt: give one as an argument or through a pipe", code=Exit.USAGE)
    if text is not None and not text.strip():
        raise CliError("the prompt is empty", code=Exit.USAGE)
    key = settings.api_key.get_secret_value()
    with closing(ChatClient(url, api_key=key, connect_s=settings.connect_timeout_s)) as client:
        turn = Turn(client, Screen(), options, stats=stats)
        conversation = Conversation(system=system)
        if text is None:
            from cli.chat.repl import converse  # noqa: PLC0415  readline changes the terminal when imported

            converse(conversation, turn, settings.history)
            return
        conversation.ask(text)
        if turn.answer(conversation.messages()).interrupted:
            raise CliError("stopped", code=Exit.INTERRUPTED)


def full_prompt(argument: str | None, piped: str | None) -> str | None:
    """Return the prompt; an argument says what to do with what was piped, so it comes first. None when there is neither."""
    if argument is None or not piped:
        return piped if argument is None else argument
    return f"{argument}\n\n{piped}"


def _piped() -> str | None:
    """Return what was piped or redirected into the command, or None: a terminal or /dev/null says nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CliError(
            f"the piped prompt is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error
