"""The server's end of HTTP/2, as far as gRPC callers that know what they speak to need it: frames in, frames out. No gRPC here.

Kept small on purpose: no server push, no priorities, no table of headers (so that equal heads are equal bytes, which are
looked up instead of decoded), and what a peer may send on one stream is bounded by the connection's window alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
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
    MOST_STREAMS,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL,
    REFUSED,
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
from services.kit.wire.heads import TRACE, untraced

_log = telemetry.logger(__name__)

_LONGEST_HEADERS: Final = 65_536
_WIDEST: Final = 0x7FFFFFFF
_CREDIT: Final = 1 << 20
_MOST_STREAMS: Final = 100_000


class BrokenProtocolError(Exception):
    """The peer does not speak the protocol; `code` is HTTP/2's."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


class Stream(Protocol):
    """What a line does with its streams. `take` gets pieces of the body; `over`, `lost`: see callouts.Call."""

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
        """Say a turn's worth of what waits for the line, and return whether there is more to say at once."""


Opener = Callable[["Line", bytes], Stream | None]
"""Makes the stream that has just come in, or answers at once and returns None."""


class House(Protocol):
    """What lines belong to: it knows who takes a stream, and remembers it by its head's bytes."""

    known: dict[bytes, Opener]
    lines: "set[Line]"

    def opener(self, key: bytes, headers: Mapping[str, str], *, is_lasting: bool) -> Opener:
        """Return who takes a stream; if `is_lasting`, heads with this key (heads.untraced) mean the same ever after."""


_HELLO: Final = frame(
    SETTINGS,
    0,
    WHOLE,
    # No table of headers: then equal heads are equal bytes, and are looked up instead of decoded.
    setting(TABLE_SIZE, 0)
    + setting(MOST_STREAMS, _MOST_STREAMS)
    + setting(INITIAL_WINDOW, _WIDEST)
    + setting(LONGEST_LIST, _LONGEST_HEADERS),
) + frame(WINDOW, 0, WHOLE, (16 * _CREDIT - FIRST_WINDOW).to_bytes(4, "big"))


class Line(asyncio.Protocol):
    """One connection: frames in, frames out, flow control both ways."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._is_greeted = False
        self.streams: dict[bytes, Stream] = {}
        self._decoder = Decoder(max_header_list_size=_LONGEST_HEADERS)
        self._is_stateless = False
        self._block: tuple[bytes, int, bytes] | None = None
        self._owed = 0  # bytes received and not credited yet
        self._window = FIRST_WINDOW  # bytes that may be sent
        self.first_room = FIRST_WINDOW
        """Bytes that may be sent on a new stream."""
        self._is_paused = False
        self._turn = 0
        self.unwritten = 0
        """Bytes that leave with the next write."""
        self.head = b""
        """The head of the stream that is being opened."""
        self._held: deque[tuple[bytes, int]] = deque()
        self._out: list[bytes] = []
        self._flushing = False
        self._heard_at = self._loop.time()
        self._known = house.known
        self._last = WHOLE  # the stream that came last
        self._is_retired = False

    # ---- asyncio's side -------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._house.lines.add(self)
        self._transport.write(_HELLO)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._house.lines.discard(self)
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
        elif since_s > quiet_s and self._is_greeted:
            self._transport.write(frame(PING, 0, WHOLE, b"omniserv"))

    def break_off(self, code: int) -> None:
        """Close the connection and say why."""
        self._out.append(frame(GOAWAY, 0, WHOLE, b"\x7f\xff\xff\xff" + code.to_bytes(4, "big")))
        self._flush()
        self._transport.close()

    def retire(self) -> None:
        """Take no new streams: the peer brings them elsewhere. Those that are there go on."""
        self._is_retired = True
        self.put(frame(GOAWAY, 0, WHOLE, self._last + NO_ERROR.to_bytes(4, "big")), 0)

    def refuse(self, number: bytes) -> None:
        """Give a stream back as one on which nothing was done: the peer may bring it again."""
        self.forget(number)
        self.put(frame(RESET, 0, number, REFUSED.to_bytes(4, "big")), 0)

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
        self._out.append(frames)
        self.unwritten += len(frames)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _offer(self) -> None:
        """Let streams with more to say go on, in turns, until the line is full again."""
        streams = list(self.streams.values())
        first = self._turn % len(streams) if streams else 0
        waiting = deque(streams[first:] + streams[:first])
        while waiting and not self.is_full:
            self._turn += 1
            stream = waiting.popleft()
            if stream.go_on():
                waiting.append(stream)

    def forget(self, number: bytes) -> None:
        """Take a stream off the list: whatever still comes for it is dropped."""
        self.streams.pop(number, None)

    def _flush(self) -> None:
        self._flushing = False
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()
            self.unwritten = 0

    # ---- in -------------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> bytes:
        """Take all whole frames; return what is left."""
        position, end = 0, len(data)
        if not self._is_greeted:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise BrokenProtocolError(PROTOCOL, "this is no HTTP/2 by prior knowledge")
            if end < len(PREFACE):
                return data
            self._is_greeted = True
            position = len(PREFACE)
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
                self._take_rest(kind, number, flags, data[start:stop])
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
            self._hang_up(number)

    def _take_headers(self, number: bytes, flags: int, block: bytes) -> None:
        if flags & (PADDED | PRIORITY):
            block = _without_padding(block) if flags & PADDED else block
            block = block[5:] if flags & PRIORITY else block
        if not flags & END_HEADERS:
            self._block = number, flags, block
            return
        if number in self.streams:  # trailers of the peer
            self._decode(block)
            self._hang_up(number)
            return
        key = untraced(block)
        opener = self._known.get(key) if self._is_stateless else None
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
        if flags & END_STREAM:
            self._hang_up(number)

    def _take_rest(self, kind: int, number: bytes, flags: int, payload: bytes) -> None:
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
        elif kind == SETTINGS and flags & ACK:
            self._decoder.max_allowed_table_size = 0
        elif kind == SETTINGS:
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
            self._take_headers(number, (first & END_STREAM) | END_HEADERS, block)

    def _take_settings(self, settings: Mapping[int, int]) -> None:
        self._out.append(frame(SETTINGS, ACK, WHOLE, b""))
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

    def _hang_up(self, number: bytes) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.hang_up()

    def _look_up(self, block: bytes, key: bytes) -> Opener:
        headers = self._decode(block)
        is_lasting = self._is_stateless and self._is_untraced(key, headers)
        opener = self._house.opener(key, headers, is_lasting=is_lasting)
        if self._decoder.max_allowed_table_size == self._decoder.header_table_size == 0:
            self._is_stateless = True
        return opener

    def _is_untraced(self, key: bytes, headers: dict[str, str]) -> bool:
        """Return whether a key says what the head with these headers says, but for the trace."""
        try:
            return self._decode(key) == (headers | {TRACE: ""} if TRACE in headers else headers)
        except BrokenProtocolError:
            return False

    def _decode(self, block: bytes) -> dict[str, str]:
        try:
            found = self._decoder.decode(block)
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
