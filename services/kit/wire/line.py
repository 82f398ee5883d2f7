"""The server's end of a connection: streams that callers open. No gRPC here.

A head is decoded once: whoever sends the same bytes again, but for the trace in them, is known by them.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from typing_extensions import override

from services.kit.wire.connection import COMMON_SETTINGS, WIDER, BrokenProtocolError, Connection, Stream
from services.kit.wire.frames import (
    ACK,
    GOAWAY,
    MOST_STREAMS,
    NO_ERROR,
    PREFACE,
    REFUSED,
    RESET,
    SETTINGS,
    TABLE_SIZE,
    WHOLE,
    frame,
    setting,
)
from services.kit.wire.heads import TRACE, untraced

_MOST_STREAMS: Final = 100_000
# No table of headers: then equal heads are equal bytes, and are looked up instead of decoded.
_OWN_SETTINGS: Final = setting(TABLE_SIZE, 0) + setting(MOST_STREAMS, _MOST_STREAMS)
_HELLO: Final = frame(SETTINGS, 0, WHOLE, COMMON_SETTINGS + _OWN_SETTINGS) + WIDER

Opener = Callable[["Line", bytes], Stream | None]
"""Makes the stream that has just come in, or answers at once and returns None."""


class House(Protocol):
    """What lines belong to: it knows who takes a stream, and remembers it by its head's bytes."""

    known: dict[bytes, Opener]
    lines: "set[Line]"

    def opener(self, key: bytes, headers: Mapping[str, str], *, is_lasting: bool) -> Opener:
        """Return who takes a stream; if `is_lasting`, heads with this key (heads.untraced) mean the same ever after."""


class Line(Connection):
    """One connection of a caller."""

    def __init__(self, house: House) -> None:
        super().__init__(_HELLO, PREFACE)
        self._house = house
        self._known = house.known
        self._looks_up = False
        self.head = b""
        """The head of the stream that is being opened."""
        self._last = WHOLE  # the stream that came last
        self._is_retired = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._house.lines.add(self)
        super().connection_made(transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._house.lines.discard(self)
        super().connection_lost(exc)

    def retire(self) -> None:
        """Take no new streams: the peer brings them elsewhere. Those that are there go on."""
        self._is_retired = True
        self.put(frame(GOAWAY, 0, WHOLE, self._last + NO_ERROR.to_bytes(4, "big")), 0)

    def refuse(self, number: bytes) -> None:
        """Give a stream back as one on which nothing was done: the peer may bring it again."""
        self.forget(number)
        self.put(frame(RESET, 0, number, REFUSED.to_bytes(4, "big")), 0)

    @override
    def headed(self, number: bytes, block: bytes, *, is_last: bool) -> None:
        if number in self.streams:  # trailers of the peer
            self.decode(block)
            self.hang_up(number)
            return
        key = untraced(block)
        opener = self._known.get(key) if self._looks_up else None
        if opener is None:
            opener = self._look_up(block, key)
        if self._is_retired or len(self.streams) >= _MOST_STREAMS:
            self.refuse(number)
            return
        self._last, self.head = number, block
        stream = opener(self, number)
        if stream is None:
            return
        self.streams[number] = stream
        if is_last:
            self.hang_up(number)

    @override
    def take_rest(self, kind: int, number: bytes, flags: int, payload: bytes) -> None:
        if kind == SETTINGS and flags & ACK:
            self.decoder.max_allowed_table_size = 0
        super().take_rest(kind, number, flags, payload)

    def _look_up(self, block: bytes, key: bytes) -> Opener:
        headers = self.decode(block)
        is_lasting = self._looks_up and self._is_untraced(key, headers)
        opener = self._house.opener(key, headers, is_lasting=is_lasting)
        if self.decoder.max_allowed_table_size == self.decoder.header_table_size == 0:
            self._looks_up = True
        return opener

    def _is_untraced(self, key: bytes, headers: dict[str, str]) -> bool:
        """Return whether a key says what the head with these headers says, but for the trace."""
        try:
            return self.decode(key) == (headers | {TRACE: ""} if TRACE in headers else headers)
        except BrokenProtocolError:
            return False
