"""Envoy's calls to a service (ext_proc and its like), served for a tenth of what gRPC's own asyncio server costs.

Envoy opens such a call for every request, so here the call is what is expensive, not what is decided in it. There is no
task per call: what comes in calls the methods of a `Call`, and what they send leaves with the next write. Only callers with
the right service token get so far as to be heard; whoever breaks the protocol (line.py) loses the connection.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import grpc
from typing_extensions import override

from services.kit import telemetry
from services.kit.access import TOKEN_KEY, refusal, rules_of
from services.kit.tokens import TokenBook
from services.kit.wire.connection import Stream
from services.kit.wire.frames import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LONGEST_FRAME,
    NO_ERROR,
    heading,
    literal,
)
from services.kit.wire.line import Line, Opener
from services.kit.wire.messages import HEAD, enveloped
from services.kit.wire.metadata import status_block

_log = telemetry.logger(__name__)

_MOST_KNOWN: Final = 1_000
LOOKED_EVERY_S: Final = 5.0
SILENT_S: Final = 15.0
"""A peer that answers no ping for so long is gone, and with it its calls."""
_LONGEST_QUESTION: Final = 1 << 18
LONGEST_MESSAGE: Final = LONGEST_FRAME - HEAD
"""Bytes of an answer that fits into one frame with the five bytes that gRPC puts before it."""

_OK_HEAD: Final = b"\x88" + literal(b"content-type", b"application/grpc")
_HEAD_START: Final = len(_OK_HEAD).to_bytes(3, "big") + bytes((HEADERS, END_HEADERS))
_OK_TAIL: Final = literal(b"grpc-status", b"0")
_TAIL_START: Final = len(_OK_TAIL).to_bytes(3, "big") + bytes((HEADERS, END_HEADERS | END_STREAM))

BESIDE: Final = 11
"""How far from a service's own port its callouts are served, where nothing else is said."""


def beside(address: str) -> str:
    """Return where a service at an address serves its callouts; port 0 stays 0."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + BESIDE if int(port) else 0}"


def envelope(message: bytes) -> bytes:
    """Return a serialised answer as `Call.send` takes it. Raises ValueError above LONGEST_MESSAGE."""
    if len(message) > LONGEST_MESSAGE:
        raise ValueError(f"an answer of {len(message)} bytes; {LONGEST_MESSAGE} is the most")
    return enveloped(message)


class Call:
    """One call. Subclasses say what happens with its messages; all of it on the event loop's thread.

    `message` gets each serialised question. `over` comes once, when the caller has said its last or is gone: answers may
    still be sent from within it, nothing can after it. It does not come when the call was ended from here. `lost` comes
    in its place when the whole connection ended.
    """

    __slots__ = ("_headed", "_line", "_number", "_partial")

    def __init__(self, line: Line, number: bytes) -> None:
        self._line = line
        self._number = number
        self._headed = False
        self._partial = b""

    # ---- for subclasses -------------------------------------------------------------------------------------------

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
        data = b"%b\0\0%b%b" % (len(answer).to_bytes(3, "big"), self._number, answer)
        if not self._headed:
            self._headed = True
            data = b"%b%b%b%b" % (_HEAD_START, self._number, _OK_HEAD, data)
        self._line.put(data, len(answer))

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, text: str = "") -> None:
        """End the call from here."""
        self._line.forget(self._number)
        if code is grpc.StatusCode.OK and self._headed:
            self._line.put(b"%b%b%b" % (_TAIL_START, self._number, _OK_TAIL), 0)
            return
        tail = status_block(code, text[:1_000], ())
        block = tail if self._headed else _OK_HEAD + tail
        self._line.put(heading(self._number, block, is_last=True), 0)

    def refuse(self) -> None:
        """Give the call back as one that was never taken up; only before anything was sent."""
        self._line.refuse(self._number)

    # ---- for the line ---------------------------------------------------------------------------------------------

    def take(self, payload: bytes) -> None:
        """Take a piece of the stream of questions, each with gRPC's five bytes before it."""
        try:
            self._take(self._partial + payload if self._partial else payload)
        except Exception:  # noqa: BLE001 - whatever it is, it is one call that fails
            _log.exception("a call failed")
            self._fail(grpc.StatusCode.INTERNAL, "unexpected error; the log has the stack")

    def hang_up(self) -> None:
        """Take note that the caller has said its last."""
        self.over()
        self.end()

    def room(self, more: int) -> None:
        """Pay no heed: Envoy's windows of single calls are never the narrow ones for answers of one frame each."""

    def go_on(self) -> bool:
        """Return False: answers are short, and the line holds those that do not fit."""
        return False

    def _take(self, data: bytes) -> None:
        position, end = 0, len(data)
        while end - position >= 5:
            size = int.from_bytes(data[position + 1 : position + 5], "big")
            if data[position] or size > _LONGEST_QUESTION:
                self._fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "a message is compressed or too large")
                return
            stop = position + 5 + size
            if stop > end:
                break
            self.message(data[position + 5 : stop])
            position = stop
        self._partial = data[position:]

    def _fail(self, code: grpc.StatusCode, text: str) -> None:
        self.over()
        self.end(code, text)


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


class Callouts:
    """Serves `openers` by path (`/package.Service/Method`). `run` must be running."""

    def __init__(self, openers: Mapping[str, Opener], check: Check) -> None:
        self._openers = openers
        self._check = check
        self.known: dict[bytes, Opener] = {}
        self.lines: set[Line] = set()
        self.stop_listening: Callable[[], None] = lambda: None

    def opener(self, key: bytes, headers: Mapping[str, str], *, is_lasting: bool) -> Opener:
        """Return what takes a call with these headers, and spare the next one with equal headers the decoding."""
        path = headers.get(":path", "")
        why = self._check(path, headers.get(TOKEN_KEY))
        if why is not None:
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, why)
        opener = self._openers.get(path)
        if opener is None:
            return _refusing(grpc.StatusCode.UNIMPLEMENTED, f"no {path} here")
        if is_lasting:
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[key] = opener
        return opener

    def calls(self) -> list[Stream]:
        """Return the calls that run."""
        return [call for line in self.lines for call in line.streams.values()]

    async def run(self) -> None:
        """Look after the connections until cancelled: a peer that vanished without a word is found by pings."""
        while True:
            await asyncio.sleep(LOOKED_EVERY_S)
            for line in list(self.lines):
                line.look(quiet_s=LOOKED_EVERY_S / 2, silent_s=SILENT_S)

    def retire(self) -> None:
        """Take no new calls: callers find nobody, and try again until the next process is there."""
        self.stop_listening()
        for line in list(self.lines):
            line.retire()

    def close(self) -> None:
        """Close every connection."""
        for line in list(self.lines):
            line.break_off(NO_ERROR)


def _refusing(code: grpc.StatusCode, why: str) -> Opener:
    def refuse(line: Line, number: bytes) -> None:
        Call(line, number).end(code, why)

    return refuse


@asynccontextmanager
async def open_callouts(listen: str, callouts: Callouts) -> AsyncIterator[int]:
    """Listen for the length of a block and give the port. Raises OSError when the address cannot be had."""
    host, _, port = listen.rpartition(":")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Line(callouts), host.strip("[]"), int(port), backlog=1024)
    callouts.stop_listening = server.close
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        callouts.close()
