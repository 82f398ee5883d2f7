"""Reading calls as they are written: `{"name": ..., "arguments": {...}}`, character by character."""

import json
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

_ARGUMENTS: Final = ("arguments", "parameters")


class _NoCallError(Exception):
    """The text is no call."""


class _At(Enum):
    BEGINNING = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    END = auto()
    FAILED = auto()


@dataclass(slots=True)
class CallReader:
    """Reads one call. `name` is set as soon as it is known; arguments come out piece by piece."""

    name: str | None = None
    raw: list[str] = field(default_factory=list)
    _at: _At = _At.BEGINNING
    _key: str = ""
    _value: list[str] = field(default_factory=list)
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False
    _ready: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the closing brace has been read."""
        return self._at is _At.END

    @property
    def failed(self) -> bool:
        """Whether it has turned out to be no call."""
        return self._at is _At.FAILED

    def push(self, text: str) -> tuple[str, str]:
        """Take text up to the call's end, or up to where it fails; return the arguments that can be told now, and what is left."""
        for place, character in enumerate(text):
            if self.ended or self.failed:
                return self._take(), text[place:]
            self.raw.append(character)
            try:
                self._step(character)
            except _NoCallError:
                self._at = _At.FAILED
        return self._take(), ""

    def _take(self) -> str:
        if self.name is None:
            return ""
        ready = "".join(self._ready)
        self._ready.clear()
        return ready

    def _step(self, character: str) -> None:
        if self._at is _At.VALUE:
            self._in_value(character)
        elif self._at is _At.KEY and self._value:
            self._in_key(character)
        elif not character.isspace():
            self._between(character)

    def _between(self, character: str) -> None:
        """Take a character of the object itself."""
        if self._at is _At.BEGINNING and character == "{":
            self._at = _At.KEY
        elif self._at is _At.KEY and character == '"':
            self._value = ['"']
        elif self._at is _At.COLON and character == ":":
            self._at = _At.VALUE
            self._value, self._depth = [], 0
        elif self._at is _At.AFTER_VALUE and character == ",":
            self._at = _At.KEY
            self._value = []
        elif self._at in {_At.AFTER_VALUE, _At.KEY} and character == "}":
            self._at = _At.END
        else:
            raise _NoCallError(f"{character!r} where a call cannot have it")

    def _in_key(self, character: str) -> None:
        self._value.append(character)
        if self._string_ends(character):
            self._key, self._value = _text("".join(self._value)), []
            self._at = _At.COLON

    def _in_value(self, character: str) -> None:
        if not self._value and character.isspace():
            return
        opened = self._quoted
        if opened:
            ends = self._string_ends(character) and self._depth == 0
        elif character == '"':
            self._quoted, ends = True, False
        elif character in "{[":
            self._depth, ends = self._depth + 1, False
        elif character in "}]" and self._depth > 0:
            self._depth -= 1
            ends = self._depth == 0
        elif character in ",}" and self._depth == 0:  # after a number, true, false or null
            self._finish_value()
            self._between(character)
            return
        else:
            ends = False
        self._value.append(character)
        if self._key in _ARGUMENTS:
            self._ready.append(character)
        if ends:
            self._finish_value()

    def _string_ends(self, character: str) -> bool:
        """Follow a string; True at its closing quote."""
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            return True
        return False

    def _finish_value(self) -> None:
        if self._key == "name":
            self.name = _text("".join(self._value))
        self._at = _At.AFTER_VALUE
        self._value = []


def _text(quoted: str) -> str:
    try:
        found = json.loads(quoted)
    except ValueError:
        raise _NoCallError(f"{quoted[:40]!r} is no JSON string") from None
    if not isinstance(found, str):
        raise _NoCallError(f"{quoted[:40]!r} is no JSON string")
    return found
