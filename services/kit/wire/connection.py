"""One connection of HTTP/2, as far as gRPC needs it: frames in, frames out, flow control both ways. No gRPC here.

Kept small on purpose: no server push, no priorities, and what a peer may send on one stream is bounded by the connection's
window alone.
"""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol, cast

from hpack import Decoder
from hpack.exceptions import HPACKError
from typing_extensions import override

from services.kit import telemetry
from services.kit.wire.frames import (
    ACK,
    CALM,
    COMPRESSION,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    FLOW_CONTROL,
    FRAME_HEAD,
    FRAME_SIZE,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    LONGEST_FRAME,
    LONGEST_LIST,
    NO_TABLE,
    PADDED,
    PING,
    PRIORITY,
    PROTOCOL,
    RESET,
    SETTINGS,
    TABLE_SIZE,
    WHOLE,
    WINDOW,
    frame,
    setting,
    settings_in,
    unpadded,
)

_log = telemetry.logger(__name__)

_LONGEST_HEADERS: Final = 65_536
_WIDEST: Final = 0x7FFFFFFF
_CREDIT: Final = 1 << 20
_FIRST_TABLE: Final = 4_096

COMMON_SETTINGS: Final = setting(INITIAL_WINDOW, _WIDEST) + setting(LONGEST_LIST, _LONGEST_HEADERS)
"""What either end says of itself."""
WIDER: Final = frame(WINDOW, 0, WHOLE, (16 * _CREDIT - FIRST_WINDOW).to_bytes(4, "big"))
"""What either end says next: that it takes 16 MiB at once."""


class BrokenProtocolError(Exception):
    """The peer does not speak the protocol; `code` is HTTP/2's."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


class Stream(Protocol):
    """What a connection does with its streams."""

    def take(self, payload: bytes) -> None:
        """Take a piece of what the peer says."""

    def hang_up(self) -> None:
        """Note that the peer has said its last."""

    def over(self) -> None:
        """Note that the peer has given the stream up."""

    def lost(self) -> None:
        """Note that the connection is gone."""

    def room(self, more: int) -> None:
        """Note that the peer takes so many bytes more on this stream, or, below zero, fewer."""

    def go_on(self) -> bool:
        """Say a turn's worth of what waits for the connection, and return whether there is more to say at once."""


class Connection(asyncio.Protocol):
    """One connection, of either end. Subclasses say how it begins and what headers mean."""

    def __init__(self, greeting: bytes, expected: bytes) -> None:
        """`greeting`: what is said first. `expected`: what the peer has to say before its first frame."""
        self._loop = asyncio.get_running_loop()
        self._greeting = greeting
        self._expected = expected
        self._buffer = b""
        self.decoder = Decoder(max_header_list_size=_LONGEST_HEADERS)
        self._block: tuple[bytes, int, bytes] | None = None
        self.streams: dict[bytes, Stream] = {}
        self._owed = 0  # bytes received and not credited yet
        self._window = FIRST_WINDOW  # bytes that may be sent
        self.first_room = FIRST_WINDOW
        """Bytes that may be sent on a new stream."""
        self.head_start = b""
        """What heads begin with: a peer that allows less of a table of headers than there is at first wants to hear of it."""
        self._is_paused = False
        self._turn = 0
        self._held: deque[tuple[bytes, int]] = deque()
        self._out: list[bytes] = []
        self._flushing = False
        self.unwritten = 0
        """Bytes that leave with the next write."""
        self._heard_at = self._loop.time()

    @abstractmethod
    def headed(self, number: bytes, block: bytes, *, is_last: bool) -> None:
        """Take a whole block of headers; `is_last` when the peer says nothing after it."""

    # ---- asyncio's side -------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._greeting)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        streams, self.streams = list(self.streams.values()), {}
        self._flushing = True  # nothing is written any more
        for stream in streams:
            stream.lost()

    @override
    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        self._flushing = True  # what is answered meanwhile leaves together
        try:
            self._buffer = self._take(self._buffer + data if self._buffer else data)
        except BrokenProtocolError as error:
            _log.warning("a peer broke the protocol", error=str(error))
            self.break_off(error.code)
            return
        if self._owed > _CREDIT:
            self._out.append(frame(WINDOW, 0, WHOLE, self._owed.to_bytes(4, "big")))
            self._owed = 0
        self._flush()

    @override
    def pause_writing(self) -> None:
        self._is_paused = True

    @override
    def resume_writing(self) -> None:
        self._is_paused = False
        self._offer()

    def look(self, *, quiet_s: float, silent_s: float) -> None:
        """Ping a peer not heard of for `quiet_s`, and give up one that is silent for `silent_s`."""
        since_s = self._loop.time() - self._heard_at
        if since_s > silent_s:
            self._transport.abort()
        elif since_s > quiet_s and not self._expected:
            self._say(frame(PING, 0, WHOLE, b"omniserv"))

    def break_off(self, code: int) -> None:
        """Close the connection and say why."""
        self._out.append(frame(GOAWAY, 0, WHOLE, b"\x7f\xff\xff\xff" + code.to_bytes(4, "big")))
        self._flush()
        self._transport.close()

    @property
    def peer(self) -> str:
        """The other end, as gRPC writes it."""
        name = self._transport.get_extra_info("peername")
        if not isinstance(name, tuple) or len(name) < 2:
            return "unknown"
        host, port = name[:2]
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    # ---- out ------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the peer does not take as much as is said; streams that wait for it hear of the end by `go_on`."""
        return self._is_paused or bool(self._held)

    def put(self, frames: bytes, cost: int) -> None:
        """Send frames of which `cost` bytes count against the peer's window; in order, as soon as it has room."""
        if self._held or cost > self._window:
            self._held.append((frames, cost))
            return
        self._window -= cost
        self._say(frames)

    def _say(self, frames: bytes) -> None:
        self._out.append(frames)
        self.unwritten += len(frames)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def forget(self, number: bytes) -> None:
        """Take a stream off the list: whatever still comes for it is dropped."""
        self.streams.pop(number, None)

    def _offer(self) -> None:
        """Let streams with more to say go on, in turns, until the connection is full again."""
        streams = list(self.streams.values())
        first = self._turn % len(streams) if streams else 0
        waiting = deque(streams[first:] + streams[:first])
        while waiting and not self.is_full:
            self._turn += 1
            stream = waiting.popleft()
            if stream.go_on():
                waiting.append(stream)

    def _flush(self) -> None:
        self._flushing = False
        if self._out:
            if not self._transport.is_closing():  # uvloop refuses to write then
                self._transport.write(b"".join(self._out))
            self._out.clear()
            self.unwritten = 0

    # ---- in -------------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> bytes:
        """Take all whole frames; return what is left."""
        position, end = 0, len(data)
        if self._expected:
            if not self._expected.startswith(data[: len(self._expected)]):
                raise BrokenProtocolError(PROTOCOL, "this is no HTTP/2 by prior knowledge")
            if end < len(self._expected):
                return data
            position, self._expected = len(self._expected), b""
        while end - position >= FRAME_HEAD:
            size = int.from_bytes(data[position : position + 3], "big")
            if size > LONGEST_FRAME:
                raise BrokenProtocolError(FRAME_SIZE, f"a frame of {size} bytes; {LONGEST_FRAME} is the most")
            start = position + FRAME_HEAD
            stop = start + size
            if stop > end:
                break
            kind, flags, number = data[position + 3], data[position + 4], data[position + 5 : start]
            if self._block is not None and kind != CONTINUATION:
                raise BrokenProtocolError(PROTOCOL, "headers are interrupted by another frame")
            if kind == DATA:
                self._take_data(number, flags, data[start:stop])
            elif kind == HEADERS:
                self._take_headers(number, flags, data[start:stop])
            else:
                self.take_rest(kind, number, flags, data[start:stop])
            position = stop
        return data[position:]

    def _take_data(self, number: bytes, flags: int, payload: bytes) -> None:
        self._owed += len(payload)
        if flags & PADDED:
            payload = _without_padding(payload)
        stream = self.streams.get(number)
        if stream is None:
            return  # ended from here
        if payload:
            stream.take(payload)
        if flags & END_STREAM:
            self.hang_up(number)

    def _take_headers(self, number: bytes, flags: int, block: bytes) -> None:
        if flags & (PADDED | PRIORITY):
            block = _without_padding(block) if flags & PADDED else block
            block = block[5:] if flags & PRIORITY else block
        if flags & END_HEADERS:
            self.headed(number, block, is_last=bool(flags & END_STREAM))
        else:
            self._block = number, flags, block

    def take_rest(self, kind: int, number: bytes, flags: int, payload: bytes) -> None:
        """Take a frame that is neither body nor headers; unknown kinds are none of our business."""
        if kind == CONTINUATION:
            self._take_continuation(number, flags, payload)
        elif kind == RESET:
            stream = self.streams.pop(number, None)
            if stream is not None:
                stream.over()
        elif kind == WINDOW:
            self._take_window(number, payload)
        elif kind == PING and not flags & ACK:
            self._out.append(frame(PING, ACK, WHOLE, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(settings_in(payload))

    def _take_continuation(self, number: bytes, flags: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise BrokenProtocolError(PROTOCOL, "a continuation of nothing")
        _, first, begun = self._block
        if len(begun) + len(payload) > _LONGEST_HEADERS:
            raise BrokenProtocolError(CALM, "headers without end")
        self._block = number, first, begun + payload
        if flags & END_HEADERS:
            block, self._block = self._block[2], None
            self.headed(number, block, is_last=bool(first & END_STREAM))

    def _take_settings(self, settings: Mapping[int, int]) -> None:
        self._out.append(frame(SETTINGS, ACK, WHOLE, b""))
        if settings.get(TABLE_SIZE, _FIRST_TABLE) < _FIRST_TABLE:
            self.head_start = NO_TABLE
        first_room = settings.get(INITIAL_WINDOW, self.first_room)
        if first_room > _WIDEST:
            raise BrokenProtocolError(FLOW_CONTROL, "a window without end")
        more, self.first_room = first_room - self.first_room, first_room
        if more:
            for stream in list(self.streams.values()):
                stream.room(more)

    def _take_window(self, number: bytes, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & _WIDEST
        if number != WHOLE:
            stream = self.streams.get(number)
            if stream is not None:
                stream.room(more)
            return
        self._window += more
        if self._window > _WIDEST:
            raise BrokenProtocolError(FLOW_CONTROL, "a window without end")
        while self._held and self._held[0][1] <= self._window:
            frames, cost = self._held.popleft()
            self._window -= cost
            self._out.append(frames)
        if not self.is_full:
            self._offer()

    def hang_up(self, number: bytes) -> None:
        """Note that the peer has said its last on a stream."""
        stream = self.streams.get(number)
        if stream is not None:
            stream.hang_up()

    def decode(self, block: bytes) -> dict[str, str]:
        """Return headers, the first of each name. Raises BrokenProtocolError."""
        try:
            found = self.decoder.decode(block)
        except HPACKError as error:
            raise BrokenProtocolError(COMPRESSION, f"headers cannot be decoded: {error}") from error
        headers: dict[str, str] = {}
        for name, value in found:
            headers.setdefault(str(name), str(value))
        return headers


def _without_padding(payload: bytes) -> bytes:
    content = unpadded(payload)
    if content is None:
        raise BrokenProtocolError(PROTOCOL, "more padding than frame")
    return content
