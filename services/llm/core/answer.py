"""Taking an answer apart while it is written: what is said, what is thought, and which tools are called.

Text that may still turn out to be a mark is held back until it is decided; marks never show.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from services.llm.core.calls import CallReader
from services.llm.core.dialect import OPENINGS, Thinking, ToolFormat

_CLOSING_CALL: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the caller."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A piece of a call. `name` only in its first one."""

    index: int
    name: str
    arguments: str


Part = Said | Thought | Called


class State(Enum):
    """Where in its answer the model is."""

    SAYING = auto()
    THINKING = auto()
    CALLING = auto()
    BETWEEN_CALLS = auto()


class Splitter:
    """Takes one answer apart. `inside`: the prompt ends inside of thoughts; `tools`: how calls are written, if any may come."""

    def __init__(self, thinking: Thinking | None, *, inside: bool, tools: ToolFormat | None) -> None:
        self.state = State.THINKING if inside else State.SAYING
        self.calls = 0
        """Calls that are complete."""
        self._thinking = thinking
        self._tools = tools
        self._buffer = ""
        self._said = False
        self._thought = False
        self._call: CallReader | None = None
        self._steps: Mapping[State, Callable[[list[Part]], bool]] = MappingProxyType(
            {
                State.SAYING: self._say,
                State.THINKING: self._think,
                State.CALLING: self._read_call,
                State.BETWEEN_CALLS: self._after_call,
            }
        )

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._buffer)

    def push(self, text: str) -> list[Part]:
        """Return what is known now that this text has come."""
        self._buffer += text
        parts: list[Part] = []
        while self._steps[self.state](parts):
            pass
        return parts

    def end(self) -> list[Part]:
        """Return what was held back: nothing more comes."""
        rest, self._buffer = self._buffer, ""
        if self.state is State.THINKING:
            return [Thought(rest)] if rest.strip() else []
        if self.state is State.CALLING and self._call is not None and self._call.name is None:
            rest = self._opening() + "".join(self._call.raw) + rest
        elif self.state is not State.SAYING:
            return []
        return [Said(rest)] if rest else []

    # ---- states: each returns whether there may be more to do with the buffer --------------------------------

    def _say(self, parts: list[Part]) -> bool:
        marks: dict[str, Callable[[], None]] = {}
        if self._thinking is not None:
            marks[self._thinking.opening] = lambda: self._enter(State.THINKING)
            marks[self._thinking.closing] = lambda: None  # without an opening: it must not show all the same
        if self._tools is not None and (self._tools is not ToolFormat.BARE or not self._said):
            marks |= dict.fromkeys(OPENINGS[self._tools], self._begin_call)
        if not marks:
            self._put_said(parts, len(self._buffer))
            return False
        at, mark = _first(self._buffer, marks)
        if (
            mark is not None
            and self._tools is ToolFormat.BARE
            and mark in OPENINGS[self._tools]
            and self._buffer[:at].strip()
        ):
            at, mark = len(self._buffer), None  # a bare call is the whole answer
        if mark is None:
            length = len(self._buffer) - _held(self._buffer, marks)
            if self._said or self._buffer[:length].strip():  # space before a call would be an answer of its own
                self._put_said(parts, length)
            return False
        if self._buffer[:at].strip():
            self._put_said(parts, len(self._buffer[:at].rstrip()))
        keeps_mark = mark.startswith("{")  # the opening of a bare call is a part of it
        self._buffer = self._buffer.lstrip() if keeps_mark else self._buffer[self._buffer.index(mark) + len(mark) :]
        marks[mark]()
        return True

    def _put_said(self, parts: list[Part], length: int) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._thought and not self._said:
            text = text.lstrip()
        if text:
            self._said = self._said or bool(text.strip())
            parts.append(Said(text))

    def _think(self, parts: list[Part]) -> bool:
        assert self._thinking is not None  # noqa: S101 - only then is there such a state
        text, closing, rest = self._buffer.partition(self._thinking.closing)
        if closing:
            self._put_thought(parts, text.rstrip())
            self._buffer = rest
            self._thought, self._said = True, False
            self._enter(State.SAYING)
            return True
        length = len(text) - _held(text, (self._thinking.closing,))
        length = len(text[:length].rstrip())
        self._put_thought(parts, text[:length])
        self._buffer = text[length:] if self._thought or text.strip() else text
        return False

    def _put_thought(self, parts: list[Part], text: str) -> None:
        text = text if self._thought else text.lstrip()
        if text:
            self._thought = True
            parts.append(Thought(text))

    def _begin_call(self) -> None:
        self._call = None
        self._enter(State.CALLING)

    def _read_call(self, parts: list[Part]) -> bool:
        if self._call is None:
            self._buffer = self._buffer.lstrip(" \t\r\n[" if self._tools is ToolFormat.LISTED else None)
            if not self._buffer:
                return False
            self._call = CallReader()
        known = self._call.name is not None
        arguments, self._buffer = self._call.push(self._buffer)
        if self._call.name is not None and (arguments or not known):
            parts.append(Called(self.calls, "" if known else self._call.name, arguments))
        if self._call.failed or (self._call.ended and self._call.name is None):
            self._give_up(parts)
            return True
        if not self._call.ended:
            return False
        self.calls += 1
        self._call = None
        self._enter(State.BETWEEN_CALLS)
        return True

    def _give_up(self, parts: list[Part]) -> None:
        """Say what looked like a call and was none."""
        assert self._call is not None  # noqa: S101 - it has just failed
        if self._call.name is None:
            parts.append(Said(self._opening() + "".join(self._call.raw)))
            self._said = True
        self._call = None
        self._enter(State.SAYING)

    def _opening(self) -> str:
        return OPENINGS[self._tools][0] if self._tools in {ToolFormat.TAGGED, ToolFormat.LISTED} else ""

    def _after_call(self, parts: list[Part]) -> bool:  # noqa: ARG002 - a state's signature
        text = self._buffer.lstrip()
        if self._tools is ToolFormat.LISTED:
            text = text.lstrip("] \n")
            if text.startswith(","):
                self._buffer = text[1:]
                self._enter(State.CALLING)
                return True
        elif text.startswith(_CLOSING_CALL):
            text = text[len(_CLOSING_CALL) :].lstrip()
        elif _CLOSING_CALL.startswith(text):
            self._buffer = text
            return False
        self._buffer = text
        if text:
            self._enter(State.SAYING)
        return bool(text)

    def _enter(self, state: State) -> None:
        self.state = state


def _first(text: str, marks: Mapping[str, object]) -> tuple[int, str | None]:
    """Return where the first mark is, and which; the text's length and None when there is none."""
    found = [(text.index(mark), mark) for mark in marks if mark in text]
    return min(found) if found else (len(text), None)


def _held(text: str, marks: Mapping[str, object] | tuple[str, ...]) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
