"""An interactive conversation: what was said so far, and what a typed line means. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from cli.chat.client import Message

HELP = """\
/reset          forget the conversation, keep the system prompt
/system [TEXT]  set the system prompt, or remove it; starts a new conversation
/model NAME     ask another model from now on
/stats          show or hide tokens per second
/help           this list
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


@dataclass(frozen=True)
class Say:
    """A line for the model."""

    text: str


@dataclass(frozen=True)
class Command:
    """A line for us; `name` is without its slash and known, `argument` may be empty."""

    name: str
    argument: str


@dataclass(frozen=True)
class Unknown:
    """A line that looks like a command but is none."""

    name: str


Line: TypeAlias = Say | Command | Unknown | None

_ALIASES = {
    "exit": "exit",
    "quit": "exit",
    "reset": "reset",
    "system": "system",
    "model": "model",
    "stats": "stats",
    "help": "help",
    "?": "help",
}


def read_line(text: str) -> Line:
    """Return what a typed line means; None when it is blank. Two slashes say something that begins with one."""
    stripped = text.strip()
    if not stripped:
        return None
    if not stripped.startswith("/") or stripped.startswith("//"):
        return Say(text.removeprefix("/") if stripped.startswith("//") else text)
    name, _, argument = stripped[1:].partition(" ")
    known = _ALIASES.get(name)
    return Command(known, argument.strip()) if known else Unknown(name)


@dataclass
class Conversation:
    """The messages to send next, oldest first."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """Return the system prompt, if any, and the turns."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def ask(self, text: str) -> None:
        """Add what the user says."""
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """Add the answer, even one that was stopped midway; a question without any answer is taken back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self) -> None:
        """Forget the turns."""
        self.turns.clear()
