"""One long call to a peer, a stream both ways, on a connection of its own.

gRPC's asyncio client hands every message from a thread of its own to the event loop. On a stream that brings a message for
every token that is more than the rest of the way through the facade, and it is taken from the cores that compute the next one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import grpc
import grpc.aio
from typing_extensions import override

from services.kit import telemetry
from services.kit.wire.connection import COMMON_SETTINGS, WIDER, Connection
from services.kit.wire.frames import (
    GOAWAY,
    NO_ERROR,
    NO_TABLE,
    PREFACE,
    RESET,
    SETTINGS,
    WHOLE,
    frame,
    literal,
    setting,
)
from services.kit.wire.messages import ENCODINGS, Assembler, MessageError
from services.kit.wire.metadata import Pairs, status_of
from services.kit.wire.outlet import Outlet

_log = telemetry.logger(__name__)

_ENABLE_PUSH: Final = 2
_HELLO: Final = PREFACE + frame(SETTINGS, 0, WHOLE, COMMON_SETTINGS + setting(_ENABLE_PUSH, 0)) + WIDER
_CANCEL: Final = 0x8
_NUMBER: Final = b"\0\0\0\x01"

CONNECT_LIMIT_S: Final = 5.0
LOOKED_EVERY_S: Final = 5.0
SILENT_S: Final = 15.0
"""A peer that answers no ping for so long is gone."""


class LongCall:
    """The call. `heard` gets each serialised message of the peer; what it raises ends the call."""

    def __init__(
        self, connection: "_Dialled", head: bytes, metadata: Pairs, heard: Callable[[bytes], None], most: int
    ) -> None:
        self._connection = connection
        self._heard = heard
        self._assembler = Assembler(most)
        self._out = Outlet(connection, _NUMBER, lambda: None, head=head)
        self._ended: asyncio.Future[grpc.aio.AioRpcError | None] = asyncio.get_running_loop().create_future()
        connection.streams[_NUMBER] = self
        self._out.begin(metadata)

    # ---- for its caller -------------------------------------------------------------------------------------------

    async def say(self, message: bytes) -> None:
        """Send a serialised message, waiting while the peer does not read; no effect once the call has ended."""
        if self._out.is_open:
            self._out.send(message)
            await self._out.drained()

    async def end(self) -> grpc.aio.AioRpcError | None:
        """Wait for the peer's status and return it as gRPC would raise it; None when all is well."""
        return await asyncio.shield(self._ended)

    def cancel(self) -> None:
        """Give the call up; no effect on one that has ended."""
        if not self._ended.done():
            self._connection.put(frame(RESET, 0, _NUMBER, _CANCEL.to_bytes(4, "big")), 0)
            self._connection.forget(_NUMBER)
            self._finish(grpc.StatusCode.CANCELLED, "given up")

    def _finish(self, code: grpc.StatusCode, text: str, trailing: Pairs = ()) -> None:
        self._out.close()
        if self._ended.done():
            return
        metadata = grpc.aio.Metadata(*trailing)
        error = (
            grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, text) if code is not grpc.StatusCode.OK else None
        )
        self._ended.set_result(error)

    # ---- for its connection ---------------------------------------------------------------------------------------

    def told(self, headers: dict[str, str], *, is_last: bool) -> None:
        """Take the peer's headers: those before its first message, or its status."""
        if is_last or headers.get(":status", "200") != "200":
            self._connection.forget(_NUMBER)
            try:
                self._finish(*status_of(headers))
            except ValueError as error:
                self._finish(grpc.StatusCode.INTERNAL, str(error))

    def take(self, payload: bytes) -> None:
        """Take a piece of what the peer says."""
        try:
            for message in self._assembler.feed(payload):
                self._heard(message)
        except MessageError as error:
            self._break(error.code, str(error))
        except Exception:  # noqa: BLE001 - whatever it is, it must not end the connection's reading
            _log.exception("a message of a peer could not be taken")
            self._break(grpc.StatusCode.INTERNAL, "a message of the peer could not be taken; the log has the stack")

    def _break(self, code: grpc.StatusCode, text: str) -> None:
        self._finish(code, text)
        self._connection.put(frame(RESET, 0, _NUMBER, _CANCEL.to_bytes(4, "big")), 0)
        self._connection.forget(_NUMBER)

    def hang_up(self) -> None:
        """Note that the peer has said its last, and no status."""
        self._connection.forget(_NUMBER)
        self._finish(grpc.StatusCode.INTERNAL, "the peer ended without a status")

    def over(self) -> None:
        """Note that the peer has given the call up."""
        self._finish(grpc.StatusCode.UNAVAILABLE, "the peer gave the call up")

    def lost(self) -> None:
        """Note that the connection is gone."""
        self._finish(grpc.StatusCode.UNAVAILABLE, "the connection is lost")

    def room(self, more: int) -> None:
        """Note that the peer takes so many bytes more (or, below zero, fewer)."""
        self._out.room(more)

    def go_on(self) -> bool:
        """Say a turn's worth of what waits for the connection, and return whether there is more to say at once."""
        return self._out.go_on()


class _Dialled(Connection):
    """The caller's end of a connection that carries one call."""

    def __init__(self) -> None:
        super().__init__(_HELLO, b"")
        self.call: LongCall | None = None

    @override
    def headed(self, number: bytes, block: bytes, *, is_last: bool) -> None:
        headers = self.decode(block)
        if self.call is not None and number in self.streams:
            self.call.told(headers, is_last=is_last)

    @override
    def take_rest(self, kind: int, number: bytes, flags: int, payload: bytes) -> None:
        if kind == GOAWAY and payload[:4] < _NUMBER and self.call is not None:
            self.call.over()  # the peer has not taken the call up and never will
        super().take_rest(kind, number, flags, payload)


@asynccontextmanager
async def dialled(
    address: str, path: str, *, metadata: Pairs, heard: Callable[[bytes], None], most_bytes: int
) -> AsyncIterator[LongCall]:
    """Call `path` (`/package.Service/Method`) at `host:port` for the length of a block. Raises OSError when nobody is there.

    `most_bytes`: the longest message that is taken. Leaving the block gives up a call that has not ended.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_LIMIT_S):
        _, connection = await loop.create_connection(_Dialled, host.strip("[]"), int(port))
    call = connection.call = LongCall(connection, _head(address, path), metadata, heard, most_bytes)
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_look(connection), name=f"watch over the call {path}")
            try:
                yield call
            finally:
                watch.cancel()
    finally:
        call.cancel()
        connection.break_off(NO_ERROR)


async def _look(connection: Connection) -> None:
    while True:
        await asyncio.sleep(LOOKED_EVERY_S)
        connection.look(quiet_s=LOOKED_EVERY_S, silent_s=SILENT_S)


def _head(address: str, path: str) -> bytes:
    pairs = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "omniserve"),
        ("grpc-accept-encoding", ",".join(ENCODINGS)),
    )
    # The peer may have forbidden a table or not; this is right either way.
    return NO_TABLE + b"".join(literal(name.encode(), value.encode()) for name, value in pairs)
