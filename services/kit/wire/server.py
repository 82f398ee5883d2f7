"""A gRPC server for coroutine handlers behind guards (kit.handlers), with what kit.server uses of grpc.aio.Server."""

import asyncio
import dataclasses
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Final, cast

import grpc

from services.kit.handlers import GuardedHandlers, Handler
from services.kit.wire.call import Head, ServedCall
from services.kit.wire.frames import NO_ERROR, heading
from services.kit.wire.heads import TRACE, trace_in
from services.kit.wire.line import Line, Opener
from services.kit.wire.metadata import metadata_of, timeout_s
from services.kit.wire.outlet import Outlet

_MOST_KNOWN: Final = 1_000
_BACKLOG: Final = 1_024
_LOOKED_EVERY_S: Final = 10.0
_SILENT_S: Final = 25.0
"""A peer that answers no ping for so long is gone, and its calls are cancelled."""
_UNSUPPORTED_MEDIA: Final = b"\x08\x03415"  # :status, by its name's place in HPACK's table


class WireServer:
    """Serves handlers on one port. Calls end by themselves, by their callers, or by `stop`."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.known: dict[bytes, Opener] = {}
        self.lines: set[Line] = set()
        self._handlers: list[GuardedHandlers] = []
        self._calls: set[ServedCall] = set()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    # ---- as kit.server uses it ------------------------------------------------------------------------------------

    def add(self, handlers: GuardedHandlers) -> None:
        """Serve these handlers too."""
        self._handlers.append(handlers)

    def bind(self, listen: str) -> int:
        """Take an address, `host:port`, and return the port. Raises OSError when it cannot be had."""
        self._socket = _bound(listen)
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self) -> None:
        """Answer calls at the address that was taken. Raises RuntimeError when none was."""
        if self._socket is None:
            raise RuntimeError("the server is bound to no address")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Line(self), sock=self._socket, backlog=_BACKLOG)
        self._watch = loop.create_task(self._look())

    async def stop(self, grace_s: float | None) -> None:
        """Take no new calls; let those that run end within the grace, then cancel them and wait until they have ended."""
        if self._server is not None:
            self._server.close()
        for line in list(self.lines):
            line.retire()
        if grace_s:
            try:
                async with asyncio.timeout(grace_s):
                    await self._is_quiet.wait()
            except TimeoutError:
                pass
        for call in list(self._calls):
            call.give_up(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        await self._is_quiet.wait()
        if self._watch is not None:
            self._watch.cancel()
        for line in list(self.lines):
            line.break_off(NO_ERROR)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOKED_EVERY_S)
            for line in list(self.lines):
                line.look(quiet_s=_LOOKED_EVERY_S, silent_s=_SILENT_S)

    # ---- for lines ------------------------------------------------------------------------------------------------

    def opener(self, key: bytes, headers: Mapping[str, str], *, is_lasting: bool) -> Opener:
        """Return what takes a call with these headers."""
        opener = self._opener(headers)
        if is_lasting:
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[key] = opener
        return opener

    def _opener(self, headers: Mapping[str, str]) -> Opener:
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith("application/grpc"):
            return _no_grpc
        path = headers.get(":path", "")
        try:
            head = Head(path, metadata_of(headers), timeout_s(headers), is_streaming=False)
        except ValueError as error:
            return partial(_refuse, grpc.StatusCode.INTERNAL, str(error))
        handler = self._find(head)
        if handler is None:
            return partial(_refuse, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        head = dataclasses.replace(head, is_streaming=bool(handler.request_streaming))
        return self._traced(head) if TRACE in headers else partial(self._open, head)

    def _traced(self, head: Head) -> Opener:
        """Return what takes calls with this head but traces of their own."""
        others = tuple(item for item in head.invocation_metadata if item[0] != TRACE)

        def open_traced(line: Line, number: bytes) -> ServedCall:
            metadata = (*others, (TRACE, trace_in(line.head) or ""))
            return self._open(dataclasses.replace(head, invocation_metadata=metadata), line, number)

        return open_traced

    def _open(self, head: Head, line: Line, number: bytes) -> ServedCall:
        call = ServedCall(self, line, number, head)
        self._calls.add(call)
        self._is_quiet.clear()
        return call

    # ---- for calls ------------------------------------------------------------------------------------------------

    def handler(self, head: Head) -> Handler:
        """Return what answers a call."""
        for handlers in self._handlers:
            handler = handlers.service(_details(head))
            if handler is not None:
                return handler
        raise LookupError(head.method)  # it was there when the call came in

    def left(self, call: ServedCall) -> None:
        """Note that a call has ended and its handler with it."""
        self._calls.discard(call)
        if not self._calls:
            self._is_quiet.set()

    def _find(self, head: Head) -> Handler | None:
        found = (handlers.find(_details(head)) for handlers in self._handlers)
        return next((handler for handler in found if handler is not None), None)


def _details(head: Head) -> grpc.HandlerCallDetails:
    return cast("grpc.HandlerCallDetails", head)  # the stubs want attributes that can be set; nobody sets them


def _refuse(code: grpc.StatusCode, why: str, line: Line, number: bytes) -> None:
    Outlet(line, number, lambda: None).cut(code, why)


def _no_grpc(line: Line, number: bytes) -> None:
    line.put(heading(number, _UNSUPPORTED_MEDIA, is_last=True), 0)


def _bound(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as closing:
            bound = closing.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(address)
            bound.listen(_BACKLOG)
            bound.setblocking(False)  # noqa: FBT003 - the socket's own signature
            closing.pop_all()
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from error
    return bound
