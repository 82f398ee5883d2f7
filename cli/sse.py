"""Server-sent events: bytes in, events out. Pure, so that every way of cutting a stream into pieces can be tested."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class SseEvent:
    """One event of the stream; `data` joins its data lines with newlines."""

    data: str
    event: str = "message"


@dataclass(frozen=True)
class SseComment:
    """A line that starts with a colon: keep-alives and progress, which no SDK shows."""

    text: str


@dataclass
class SseDecoder:
    """Decodes one stream. Feed pieces as they come; whatever is complete by then is returned, in order.

    An event cut off by the end of the stream is never returned, as the standard demands: half an answer is not an answer.
    """

    _text: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8-sig")("replace")
    )
    _rest: str = ""
    _data: list[str] = field(default_factory=list)
    _event: str = ""

    def feed(self, piece: bytes) -> list[SseEvent | SseComment]:
        """Return the events and comments that `piece` completes."""
        text = self._rest + self._text.decode(piece)
        # A lone carriage return at the end may be the first half of a CRLF: leave it until the next piece says so.
        held = "\r" if text.endswith("\r") else ""
        *lines, self._rest = _LINE_END.split(text[: len(text) - len(held)])
        self._rest += held
        found = []
        for line in lines:
            item = self._line(line)
            if item is not None:
                found.append(item)
        return found

    def _line(self, line: str) -> SseEvent | SseComment | None:
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            return SseComment(line[1:].strip())
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None

    def _dispatch(self) -> SseEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return SseEvent("\n".join(data), event or "message")
