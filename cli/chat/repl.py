"""The interactive chat: a line editor with history around the conversation."""

from __future__ import annotations

import os
import readline
from dataclasses import replace
from typing import TYPE_CHECKING

from cli.chat.conversation import HELP, Command, Say, Unknown, read_line
from cli.errors import CliError
from cli.terminal import note

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cli.chat.conversation import Conversation
    from cli.chat.turn import Turn

_HISTORY_LINES = 1000


def converse(conversation: Conversation, turn: Turn, history: Path) -> None:
    """Read lines and answer them until Ctrl-D or /exit. An error is shown and the conversation goes on."""
    history = history.expanduser()
    _load_history(history)
    print("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    try:
        while True:
            try:
                line = read_line(_typed())
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D leaves)")
                continue
            if isinstance(line, Command) and line.name == "exit":
                return
            _carry_out(line, conversation, turn)
    finally:
        _save_history(history)


def _typed() -> str:
    text = input("> ")
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{input('… ')}"
    return text


def _carry_out(line: Say | Command | Unknown | None, conversation: Conversation, turn: Turn) -> None:
    match line:
        case Say(text):
            _answer(text, conversation, turn)
        case Command(name, argument):
            _COMMANDS[name](argument, conversation, turn)
        case Unknown(name):
            note(f"there is no /{name}; /help lists what there is")
        case None:
            pass


def _answer(text: str, conversation: Conversation, turn: Turn) -> None:
    conversation.ask(text)
    try:
        said = turn.answer(conversation.messages())
    except CliError as error:
        conversation.answered("")
        note(error.message)
        return
    conversation.answered(said.text)
    if said.interrupted:
        note("(stopped)")


def _reset(_: str, conversation: Conversation, __: Turn) -> None:
    conversation.reset()
    note("the conversation starts anew")


def _system(argument: str, conversation: Conversation, _: Turn) -> None:
    conversation.system = argument or None
    conversation.reset()
    note("the conversation starts anew " + ("with this system prompt" if argument else "without a system prompt"))


def _model(argument: str, _: Conversation, turn: Turn) -> None:
    if not argument:
        note(f"the model is {turn.options.model or 'the default one'}; `omniserve models list` shows the others")
        return
    turn.options = replace(turn.options, model=argument)


def _stats(_: str, __: Conversation, turn: Turn) -> None:
    turn.stats = not turn.stats
    note(f"statistics are {'shown' if turn.stats else 'hidden'}")


def _help(_: str, __: Conversation, ___: Turn) -> None:
    print(HELP)


_COMMANDS: dict[str, Callable[[str, Conversation, Turn], None]] = {
    "reset": _reset,
    "system": _system,
    "model": _model,
    "stats": _stats,
    "help": _help,
}


def _load_history(path: Path) -> None:
    try:
        readline.read_history_file(path)
    except OSError:
        return  # none yet, or not ours to read: a chat without history is still a chat


def _save_history(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # conversations are nobody else's business
        readline.set_history_length(_HISTORY_LINES)
        readline.write_history_file(path)
    except OSError as error:
        note(f"the history was not saved: {error}")
