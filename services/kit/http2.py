"""The server's end of HTTP/2, as far as gRPC callers that know what they speak to need it: frames in, frames out. No gRPC here.

Kept small on purpose: no server push, no priorities, no table of headers (so that equal heads are equal bytes, which are
looked up instead of decoded), and windows of single streams that are never the narrow ones.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

from hpack import Decoder
from hpack.exceptions import HPACKError
from typing_extensions import override

from services.kit import telemetry
from services.kit.heads import TRACE, untraced

_log = telemetry.logger(__name__)

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, _PROTOCOL, _FLOW_CONTROL, _FRAME_SIZE, _REFUSED, _COMPRESSION, _CALM = 0x0, 0x1, 0x3, 0x6, 0x7, 0x9, 0xB
_WHOLE: Final = b"\0\0\0\0"  # the connection's own number

_FRAME_HEAD: Final = 9
LONGEST_FRAME: Final = 16_384
_LONGEST_HEADERS: Final = 65_536
_STREAMS_WINDOW: Final = 0x7FFFFFFF  # what a stream may send at once is bounded by the connection's window alone
_CREDIT: Final = 1 << 20
_MOST_STREAMS: Final = 100_000

LOOKED_EVERY_S: Final = 5.0
SILENT_S: Final = 15.0
"""A peer that answers no ping for so long is gone, and with it its streams."""


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


Opener = Callable[["Line", bytes], Stream | None]
"""Makes the stream that has just come in, or answers at once and returns None."""


class House(Protocol):
    """What lines belong to: it knows who takes a stream, and remembers it by its head's bytes."""

    known: dict[bytes, Opener]
    lines: "set[Line]"

    def opener(self, key: bytes, headers: Mapping[str, str], *, is_lasting: bool) -> Opener:
        """Return who takes a stream; if `is_lasting`, heads with this key (heads.untraced) mean the same ever after."""


def frame(kind: int, flags: int, number: bytes, payload: bytes) -> bytes:
    """Return a frame."""
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, number, payload)


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header that no table remembers, not compressed; the name is shorter than 127 bytes."""
    return b"\0%c%b%b%b" % (len(name), name, _length(value), value)


def _length(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes((len(value),))
    rest, parts = len(value) - 127, bytearray(b"\x7f")
    while rest >= 128:
        parts.append(rest % 128 + 128)
        rest //= 128
    return bytes(parts + bytes((rest,)))


_HELLO: Final = frame(
    SETTINGS,
    0,
    _WHOLE,
    b"".join(
        number.to_bytes(2, "big") + value.to_bytes(4, "big")
        # No table of headers: then equal heads are equal bytes, and are looked up instead of decoded.
        for number, value in ((1, 0), (3, _MOST_STREAMS), (4, _STREAMS_WINDOW), (6, _LONGEST_HEADERS))
    ),
) + frame(WINDOW, 0, _WHOLE, (16 * _CREDIT - 65_535).to_bytes(4, "big"))


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
        self._window = 65_535  # bytes that may be sent
        self._held: deque[tuple[bytes, int]] = deque()
        self._out: list[bytes] = []
        self._flushing = False
        self._heard_at = self._loop.time()
        self._known = house.known
        self._last = _WHOLE  # the stream that came last

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
            self._out.append(frame(WINDOW, 0, _WHOLE, self._owed.to_bytes(4, "big")))
            self._owed = 0
        self._flush()

    def look(self) -> None:
        """Ping a quiet peer, and give up one that is silent for too long."""
        silent_s = self._loop.time() - self._heard_at
        if silent_s > SILENT_S:
            self._transport.abort()
        elif silent_s > LOOKED_EVERY_S / 2 and self._is_greeted:
            self._transport.write(frame(PING, 0, _WHOLE, b"omniserv"))

    def break_off(self, code: int) -> None:
        """Close the connection and say why."""
        self._out.append(frame(GOAWAY, 0, _WHOLE, b"\x7f\xff\xff\xff" + code.to_bytes(4, "big")))
        self._flush()
        self._transport.close()

    def retire(self) -> None:
        """Take no new streams: the peer brings them elsewhere. Those that are there go on."""
        self.put(frame(GOAWAY, 0, _WHOLE, self._last + NO_ERROR.to_bytes(4, "big")), 0)

    def refuse(self, number: bytes) -> None:
        """Give a stream back as one on which nothing was done: the peer may bring it again."""
        self.forget(number)
        self.put(frame(RESET, 0, number, _REFUSED.to_bytes(4, "big")), 0)

    # ---- out ------------------------------------------------------------------------------------------------------

    def put(self, frames: bytes, cost: int) -> None:
        """Send frames of which `cost` bytes count against the peer's window; in order, as soon as it has room."""
        if self._held or cost > self._window:
            self._held.append((frames, cost))
            return
        self._window -= cost
        self._out.append(frames)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def forget(self, number: bytes) -> None:
        """Take a stream off the list: whatever still comes for it is dropped."""
        self.streams.pop(number, None)

    def _flush(self) -> None:
        self._flushing = False
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    # ---- in -------------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> bytes:
        """Take all whole frames; return what is left."""
        position, end = 0, len(data)
        if not self._is_greeted:
            if not _PREFACE.startswith(data[: len(_PREFACE)]):
                raise BrokenProtocolError(_PROTOCOL, "this is no HTTP/2 by prior knowledge")
            if end < len(_PREFACE):
                return data
            self._is_greeted = True
            position = len(_PREFACE)
        while end - position >= _FRAME_HEAD:
            size = int.from_bytes(data[position : position + 3], "big")
            if size > LONGEST_FRAME:
                raise BrokenProtocolError(_FRAME_SIZE, f"a frame of {size} bytes; {LONGEST_FRAME} is the most")
            start = position + _FRAME_HEAD
            stop = start + size
            if stop > end:
                break
            kind, flags, number = data[position + 3], data[position + 4], data[position + 5 : start]
            if self._block is not None and kind != CONTINUATION:
                raise BrokenProtocolError(_PROTOCOL, "headers are interrupted by another frame")
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
        if flags & _PADDED:
            payload = _unpadded(payload)
        stream = self.streams.get(number)
        if stream is None:
            return  # ended from here
        if payload:
            stream.take(payload)
        if flags & END_STREAM:
            self._hang_up(number)

    def _take_headers(self, number: bytes, flags: int, block: bytes) -> None:
        if flags & (_PADDED | _PRIORITY):
            block = _unpadded(block) if flags & _PADDED else block
            block = block[5:] if flags & _PRIORITY else block
        if not flags & END_HEADERS:
            self._block = number, flags, block
            return
        if number in self.streams:  # trailers of the peer
            self._decode(block)
            self._hang_up(number)
            return
        key = untraced(block)
        opener = self._known.get(key) if self._is_stateless else None
        self._last = number
        if opener is None:
            opener = self._look_up(block, key)
        if len(self.streams) >= _MOST_STREAMS:
            self.refuse(number)
            return
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
            self._out.append(frame(PING, ACK, _WHOLE, payload))
        elif kind == SETTINGS and flags & ACK:
            self._decoder.max_allowed_table_size = 0
        elif kind == SETTINGS:
            self._out.append(frame(SETTINGS, ACK, _WHOLE, b""))

    def _take_continuation(self, number: bytes, flags: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise BrokenProtocolError(_PROTOCOL, "a continuation of nothing")
        _, first, begun = self._block
        if len(begun) + len(payload) > _LONGEST_HEADERS:
            raise BrokenProtocolError(_CALM, "headers without end")
        self._block = number, first, begun + payload
        if flags & END_HEADERS:
            block, self._block = self._block[2], None
            self._take_headers(number, (first & END_STREAM) | END_HEADERS, block)

    def _take_window(self, number: bytes, payload: bytes) -> None:
        """Note room for more. A stream's own window is never the narrow one: all that is sent on it fits from the start."""
        if number != _WHOLE:
            return
        self._window += int.from_bytes(payload, "big") & 0x7FFFFFFF
        if self._window > 0x7FFFFFFF:
            raise BrokenProtocolError(_FLOW_CONTROL, "a window without end")
        while self._held and self._held[0][1] <= self._window:
            frames, cost = self._held.popleft()
            self._window -= cost
            self._out.append(frames)

    def _hang_up(self, number: bytes) -> None:
        stream = self.streams.pop(number, None)
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
            raise BrokenProtocolError(_COMPRESSION, f"headers cannot be decoded: {error}") from error
        headers: dict[str, str] = {}
        for name, value in found:
            headers.setdefault(str(name), str(value))
        return headers


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise BrokenProtocolError(_PROTOCOL, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
