"""Envoy's calls to a service (ext_proc and its like), served for a tenth of what gRPC's own asyncio server costs.

Envoy opens such a call for every request, so here the call is what is expensive, not what is decided in it. This is the
server's end of HTTP/2 as far as gRPC needs it: frames in, methods of a `Call` out, no task per call. Only callers with the
right service token get so far as to be parsed for anything else; whoever breaks the protocol loses the connection.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast

import grpc
from hpack import Decoder
from hpack.exceptions import HPACKError
from typing_extensions import override

from services.kit import telemetry
from services.kit.access import TOKEN_KEY, refusal, rules_of
from services.kit.tokens import TokenBook

_log = telemetry.logger(__name__)

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_NO_ERROR, _PROTOCOL, _FLOW_CONTROL, _FRAME_SIZE, _REFUSED, _COMPRESSION, _CALM = 0x0, 0x1, 0x3, 0x6, 0x7, 0x9, 0xB
_WHOLE: Final = b"\0\0\0\0"  # the connection's own number

_FRAME_HEAD: Final = 9
_LONGEST_FRAME: Final = 16_384
_LONGEST_HEADERS: Final = 65_536
_CALLS_WINDOW: Final = 0x7FFFFFFF  # what a call may send at once is bounded by the connection's window alone
_CREDIT: Final = 1 << 20
_LONGEST_QUESTION: Final = 1 << 18
_MOST_CALLS: Final = 100_000
_MOST_KNOWN: Final = 1_000
LONGEST_MESSAGE: Final = _LONGEST_FRAME - 5
"""Bytes of an answer, and of a question that fits into one frame with the five bytes that gRPC puts before it."""

BESIDE: Final = 11
"""How far from a service's own port its callouts are served, where nothing else is said."""

LOOKED_EVERY_S: Final = 5.0
SILENT_S: Final = 15.0
"""A caller that answers no ping for so long is gone, and with it its calls."""


class _BrokenError(Exception):
    """The peer does not speak the protocol; `code` is HTTP/2's."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


def _frame(kind: int, flags: int, number: bytes, payload: bytes) -> bytes:
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, number, payload)


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header that no table remembers, not compressed."""
    return b"\0%c%b%b%b" % (len(name), name, _length(value), value)


def _length(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes((len(value),))
    rest, parts = len(value) - 127, bytearray(b"\x7f")
    while rest >= 128:
        parts.append(rest % 128 + 128)
        rest //= 128
    return bytes(parts + bytes((rest,)))


_OK_HEAD: Final = b"\x88" + _literal(b"content-type", b"application/grpc")
_HEAD_START: Final = len(_OK_HEAD).to_bytes(3, "big") + bytes((_HEADERS, _END_HEADERS))
_OK_TAIL: Final = _literal(b"grpc-status", b"0")
_TAIL_START: Final = len(_OK_TAIL).to_bytes(3, "big") + bytes((_HEADERS, _END_HEADERS | _END_STREAM))
_HELLO: Final = _frame(
    _SETTINGS,
    0,
    _WHOLE,
    b"".join(
        number.to_bytes(2, "big") + value.to_bytes(4, "big")
        # No table of headers: then equal heads are equal bytes, and are looked up instead of decoded.
        for number, value in ((1, 0), (3, _MOST_CALLS), (4, _CALLS_WINDOW), (6, _LONGEST_HEADERS))
    ),
) + _frame(_WINDOW, 0, _WHOLE, (16 * _CREDIT - 65_535).to_bytes(4, "big"))


def beside(address: str) -> str:
    """Return where a service at an address serves its callouts; port 0 stays 0."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + BESIDE if int(port) else 0}"


def envelope(message: bytes) -> bytes:
    """Return a serialised answer as `Call.send` takes it. Raises ValueError above LONGEST_MESSAGE."""
    if len(message) > LONGEST_MESSAGE:
        raise ValueError(f"an answer of {len(message)} bytes; {LONGEST_MESSAGE} is the most")
    return b"\0" + len(message).to_bytes(4, "big") + message


class Call:
    """One call. Subclasses say what happens with its messages; all of it on the event loop's thread.

    `message` gets each serialised question. `over` comes once, when the caller has said its last or is gone: answers may
    still be sent from within it, nothing can after it. It does not come when the call was ended from here. `lost` comes
    in its place when the whole connection ended.
    """

    __slots__ = ("_headed", "_line", "_number", "_partial")

    def __init__(self, line: "Line", number: bytes) -> None:
        self._line = line
        self._number = number
        self._headed = False
        self._partial = b""

    def message(self, data: bytes) -> None:
        """Take a question."""
        raise NotImplementedError

    def over(self) -> None:
        """Take note that the caller is done."""

    def lost(self) -> None:
        """Take note that the connection is gone, and the caller perhaps not; nothing can be sent."""
        self.over()

    def send(self, answer: bytes) -> None:
        """Send what `envelope` made."""
        frame = b"%b\0\0%b%b" % (len(answer).to_bytes(3, "big"), self._number, answer)
        if not self._headed:
            self._headed = True
            frame = b"%b%b%b%b" % (_HEAD_START, self._number, _OK_HEAD, frame)
        self._line.put(frame, len(answer))

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, text: str = "") -> None:
        """End the call from here."""
        self._line.forget(self._number)
        self._close(code, text)

    def _close(self, code: grpc.StatusCode, text: str) -> None:
        if code is grpc.StatusCode.OK and self._headed:
            self._line.put(b"%b%b%b" % (_TAIL_START, self._number, _OK_TAIL), 0)
            return
        status: int = code.value[0]
        tail = _literal(b"grpc-status", str(status).encode())
        if text:
            tail += _literal(b"grpc-message", text.encode("ascii", "replace")[:1_000])
        block = tail if self._headed else _OK_HEAD + tail
        self._line.put(_frame(_HEADERS, _END_HEADERS | _END_STREAM, self._number, block), 0)

    def _receive(self, payload: bytes) -> None:
        """Take a piece of the stream of questions, each with gRPC's five bytes before it."""
        if self._partial:
            payload = self._partial + payload
            self._partial = b""
        position, end = 0, len(payload)
        while end - position >= 5:
            size = int.from_bytes(payload[position + 1 : position + 5], "big")
            if payload[position] or size > _LONGEST_QUESTION:
                self._line.forget(self._number)
                self.over()
                self._close(grpc.StatusCode.RESOURCE_EXHAUSTED, "a message is compressed or too large")
                return
            stop = position + 5 + size
            if stop > end:
                break
            self.message(payload[position + 5 : stop])
            position = stop
        self._partial = payload[position:]


Opener = Callable[["Line", bytes], Call]
"""Makes the call that has just come in: a subclass of Call, or a function that returns one."""

Check = Callable[[str, str | None], str | None]
"""Says why the bearer of a service token may not call a path, or None when it may."""


def unary(answer: Callable[[bytes], bytes]) -> Opener:
    """Return what takes calls of one question and one answer, both serialised."""

    class Unary(Call):
        __slots__ = ()

        @override
        def message(self, data: bytes) -> None:
            self.send(envelope(answer(data)))

    return Unary


def check_tokens(service_names: Sequence[str], book: TokenBook | None) -> Check:
    """Return the check that the contracts' access rules ask for; `book` None believes everybody.

    Raises AccessRulesMissingError as a server does.
    """
    rules = rules_of(service_names)

    def check(path: str, token: str | None) -> str | None:
        rule = rules.get(path)
        if book is None or rule is None:
            return None  # an unknown path is answered as such
        service = book.service_of(token) if token else None
        if service is None:
            return f"{path} wants a service token in the metadata {TOKEN_KEY}"
        return refusal(rule, service)

    return check


class _Refused(Call):
    """A call that nobody takes."""

    __slots__ = ()

    @override
    def message(self, data: bytes) -> None:
        pass


class Callouts:
    """Serves `openers` by path (`/package.Service/Method`). `run` must be running."""

    def __init__(self, openers: Mapping[str, Opener], check: Check) -> None:
        self._openers = openers
        self._check = check
        self.known: dict[bytes, Opener] = {}
        self.lines: set[Line] = set()

    def opener(self, headers: Mapping[str, str]) -> Opener:
        """Return what takes a call with these headers: also those that nobody may make, or that nobody knows."""
        path = headers.get(":path", "")
        why = self._check(path, headers.get(TOKEN_KEY))
        if why is not None:
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, why)
        return self._openers.get(path) or _refusing(grpc.StatusCode.UNIMPLEMENTED, f"no {path} here")

    def remember(self, block: bytes, headers: Mapping[str, str], opener: Opener) -> None:
        """Spare the next call with equal headers the decoding, unless they will never be equal again."""
        if "traceparent" in headers or headers.get(":path") not in self._openers:
            return
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        self.known[block] = opener

    def calls(self) -> list[Call]:
        """Return the calls that run."""
        return [call for line in self.lines for call in line.calls.values()]

    async def run(self) -> None:
        """Look after the connections until cancelled: a peer that vanished without a word is found by pings."""
        while True:
            await asyncio.sleep(LOOKED_EVERY_S)
            for line in list(self.lines):
                line.look()

    def close(self) -> None:
        """Close every connection."""
        for line in list(self.lines):
            line.break_off(_NO_ERROR)


def _refusing(code: grpc.StatusCode, why: str) -> Opener:
    def refuse(line: "Line", number: bytes) -> Call:
        call = _Refused(line, number)
        call._close(code, why)  # noqa: SLF001 - it was never entered, so there is nothing to forget
        return call

    refuse.is_refusal = True  # type: ignore[attr-defined]
    return refuse


@asynccontextmanager
async def open_callouts(listen: str, callouts: Callouts) -> AsyncIterator[int]:
    """Listen for the length of a block and give the port. Raises OSError when the address cannot be had."""
    host, _, port = listen.rpartition(":")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Line(callouts), host.strip("[]"), int(port), backlog=1024)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        callouts.close()


class Line(asyncio.Protocol):
    """One connection: frames in, frames out, flow control both ways."""

    def __init__(self, callouts: Callouts) -> None:
        self._callouts = callouts
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._is_greeted = False
        self.calls: dict[bytes, Call] = {}
        self._decoder = Decoder(max_header_list_size=_LONGEST_HEADERS)
        self._is_stateless = False
        self._block: tuple[bytes, int, bytes] | None = None
        self._owed = 0  # bytes received and not credited yet
        self._window = 65_535  # bytes that may be sent
        self._held: deque[tuple[bytes, int]] = deque()
        self._out: list[bytes] = []
        self._flushing = False
        self._heard_at = self._loop.time()
        self._known = callouts.known

    # ---- asyncio's side -------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._callouts.lines.add(self)
        self._transport.write(_HELLO)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._callouts.lines.discard(self)
        calls, self.calls = list(self.calls.values()), {}
        self._flushing = True  # nothing is written any more
        for call in calls:
            call.lost()

    @override
    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        self._flushing = True  # what is answered meanwhile leaves together
        try:
            self._buffer = self._take(self._buffer + data if self._buffer else data)
        except _BrokenError as error:
            _log.warning("a caller broke the protocol", error=str(error))
            self.break_off(error.code)
            return
        if self._owed > _CREDIT:
            self._out.append(_frame(_WINDOW, 0, _WHOLE, self._owed.to_bytes(4, "big")))
            self._owed = 0
        self._flush()

    def look(self) -> None:
        """Ping a quiet peer, and give up one that is silent for too long."""
        silent_s = self._loop.time() - self._heard_at
        if silent_s > SILENT_S:
            self._transport.abort()
        elif silent_s > LOOKED_EVERY_S / 2 and self._is_greeted:
            self._transport.write(_frame(_PING, 0, _WHOLE, b"omniserv"))

    def break_off(self, code: int) -> None:
        """Close the connection and say why."""
        self._out.append(_frame(_GOAWAY, 0, _WHOLE, b"\x7f\xff\xff\xff" + code.to_bytes(4, "big")))
        self._flush()
        self._transport.close()

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
        """Take a call off the list: whatever still comes for it is dropped."""
        self.calls.pop(number, None)

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
                raise _BrokenError(_PROTOCOL, "this is no HTTP/2 by prior knowledge")
            if end < len(_PREFACE):
                return data
            self._is_greeted = True
            position = len(_PREFACE)
        while end - position >= _FRAME_HEAD:
            size = int.from_bytes(data[position : position + 3], "big")
            if size > _LONGEST_FRAME:
                raise _BrokenError(_FRAME_SIZE, f"a frame of {size} bytes; {_LONGEST_FRAME} is the most")
            start = position + _FRAME_HEAD
            stop = start + size
            if stop > end:
                break
            kind, flags, number = data[position + 3], data[position + 4], data[position + 5 : start]
            if self._block is not None and kind != _CONTINUATION:
                raise _BrokenError(_PROTOCOL, "headers are interrupted by another frame")
            if kind == _DATA:
                self._take_data(number, flags, data[start:stop])
            elif kind == _HEADERS:
                self._take_headers(number, flags, data[start:stop])
            else:
                self._take_rest(kind, number, flags, data[start:stop])
            position = stop
        return data[position:]

    def _take_data(self, number: bytes, flags: int, payload: bytes) -> None:
        self._owed += len(payload)
        if flags & _PADDED:
            payload = _unpadded(payload)
        call = self.calls.get(number)
        if call is None:
            return  # ended from here
        if payload:
            try:
                call._receive(payload)  # noqa: SLF001 - the two are one
            except Exception:  # noqa: BLE001 - whatever it is, it is one call that fails
                _log.exception("a call failed")
                self.forget(number)
                call.over()
                call._close(grpc.StatusCode.INTERNAL, "unexpected error; the log has the stack")  # noqa: SLF001
                return
        if flags & _END_STREAM:
            self._hang_up(number)

    def _take_headers(self, number: bytes, flags: int, block: bytes) -> None:
        if flags & (_PADDED | _PRIORITY):
            block = _unpadded(block) if flags & _PADDED else block
            block = block[5:] if flags & _PRIORITY else block
        if not flags & _END_HEADERS:
            self._block = number, flags, block
            return
        if number in self.calls:  # trailers of the caller
            self._decode(block)
            self._hang_up(number)
            return
        opener = self._known.get(block) if self._is_stateless else None
        if opener is None:
            opener = self._look_up(block)
        if len(self.calls) >= _MOST_CALLS:
            self._out.append(_frame(_RESET, 0, number, _REFUSED.to_bytes(4, "big")))
            return
        call = opener(self, number)
        if type(call) is _Refused:
            return
        self.calls[number] = call
        if flags & _END_STREAM:
            self._hang_up(number)

    def _take_rest(self, kind: int, number: bytes, flags: int, payload: bytes) -> None:
        if kind == _CONTINUATION:
            self._take_continuation(number, flags, payload)
        elif kind == _RESET:
            call = self.calls.pop(number, None)
            if call is not None:
                call.over()
        elif kind == _WINDOW:
            self._take_window(number, payload)
        elif kind == _PING and not flags & _ACK:
            self._out.append(_frame(_PING, _ACK, _WHOLE, payload))
        elif kind == _SETTINGS and flags & _ACK:
            self._decoder.max_allowed_table_size = 0
        elif kind == _SETTINGS:
            self._out.append(_frame(_SETTINGS, _ACK, _WHOLE, b""))

    def _take_continuation(self, number: bytes, flags: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise _BrokenError(_PROTOCOL, "a continuation of nothing")
        _, first, begun = self._block
        if len(begun) + len(payload) > _LONGEST_HEADERS:
            raise _BrokenError(_CALM, "headers without end")
        self._block = number, first, begun + payload
        if flags & _END_HEADERS:
            block, self._block = self._block[2], None
            self._take_headers(number, (first & _END_STREAM) | _END_HEADERS, block)

    def _take_window(self, number: bytes, payload: bytes) -> None:
        """Note room for more. A call's own window is never the narrow one: all that is sent on it fits from the start."""
        if number != _WHOLE:
            return
        self._window += int.from_bytes(payload, "big") & 0x7FFFFFFF
        if self._window > 0x7FFFFFFF:
            raise _BrokenError(_FLOW_CONTROL, "a window without end")
        while self._held and self._held[0][1] <= self._window:
            frames, cost = self._held.popleft()
            self._window -= cost
            self._out.append(frames)

    def _hang_up(self, number: bytes) -> None:
        """End a call whose caller has said its last."""
        call = self.calls.pop(number, None)
        if call is not None:
            call.over()
            call._close(grpc.StatusCode.OK, "")  # noqa: SLF001 - the two are one

    def _look_up(self, block: bytes) -> Opener:
        headers = self._decode(block)
        opener = self._callouts.opener(headers)
        if self._is_stateless:
            if not hasattr(opener, "is_refusal"):
                self._callouts.remember(block, headers, opener)
        elif self._decoder.max_allowed_table_size == self._decoder.header_table_size == 0:
            self._is_stateless = True
        return opener

    def _decode(self, block: bytes) -> dict[str, str]:
        try:
            found = self._decoder.decode(block)
        except HPACKError as error:
            raise _BrokenError(_COMPRESSION, f"headers cannot be decoded: {error}") from error
        headers: dict[str, str] = {}
        for name, value in found:
            headers.setdefault(str(name), str(value))
        return headers


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _BrokenError(_PROTOCOL, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
