"""What a call says: headers, messages as far as the caller takes them, a status after all of them."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import grpc
import grpc.aio

from services.kit.wire.connection import Connection
from services.kit.wire.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LONGEST_FRAME,
    frame,
    heading,
    literal,
)
from services.kit.wire.messages import ENCODINGS, enveloped
from services.kit.wire.metadata import block_of, status_block

Metadata = Iterable[tuple[str, str | bytes]]

_HEAD: Final = (
    b"\x88"
    + literal(b"content-type", b"application/grpc")
    + literal(b"grpc-accept-encoding", ",".join(ENCODINGS).encode())
)
_OK_TAIL: Final = literal(b"grpc-status", b"0")
_TAIL_START: Final = len(_OK_TAIL).to_bytes(3, "big") + bytes((HEADERS, END_HEADERS | END_STREAM))
_ENOUGH: Final = 1 << 18
"""Bytes that wait for the caller's room; who has more to say waits too."""
_TURN: Final = 1 << 16
"""Bytes that a call may say before the others have their turn, when all wait for the connection."""


class Outlet:
    """The way out of one call, of either end. `parted` is called when the status has been said; `head`: what comes first."""

    __slots__ = (
        "_head",
        "_is_headed",
        "_line",
        "_loop",
        "_number",
        "_parted",
        "_pending",
        "_pending_bytes",
        "_room",
        "_tail",
        "_writer",
        "is_open",
    )

    def __init__(self, line: Connection, number: bytes, parted: Callable[[], None], *, head: bytes = _HEAD) -> None:
        self._head = head
        self._line = line
        self._number = number
        self._parted = parted
        self._loop = asyncio.get_running_loop()
        self._room = line.first_room
        self._pending: deque[bytes | memoryview] = deque()
        self._pending_bytes = 0
        self._is_headed = False
        self._tail: bytes | None = None
        self._writer: asyncio.Future[None] | None = None
        self.is_open = True

    def begin(self, metadata: Metadata) -> None:
        """Send metadata ahead of the first message. Raises UsageError when it is too late for that."""
        if self._is_headed:
            raise grpc.aio.UsageError("Send initial metadata failed: already sent")
        block = self._line.head_start + self._head + block_of(metadata)
        self._is_headed = True
        self._line.put(heading(self._number, block, is_last=False), 0)

    def send(self, message: bytes) -> None:
        """Send a serialised message, as soon as the caller has room for it."""
        data = enveloped(message)
        if not self._is_headed:
            self._is_headed = True
            self._line.put(heading(self._number, self._line.head_start + self._head, is_last=False), 0)
        size = len(data)
        if not self._pending and size <= LONGEST_FRAME and size <= self._room and not self._line.is_full:
            self._room -= size
            self._line.put(b"%b\0\0%b%b" % (size.to_bytes(3, "big"), self._number, data), size)
            return
        self._pending.append(data)
        self._pending_bytes += size
        self._pump()

    async def drained(self) -> None:
        """Wait while much waits for the caller's room, or for the next write."""
        while self.is_open and self._pending_bytes > _ENOUGH:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        if self._line.unwritten > _ENOUGH:
            await asyncio.sleep(0)  # who never waits would gather here all that it has to say

    def end(self, code: grpc.StatusCode, text: str, metadata: Metadata) -> None:
        """Say the status after all that was sent; no effect after `cut`."""
        if not self.is_open:
            return
        if code is grpc.StatusCode.OK and self._is_headed and not text and not metadata:
            self._tail = b"%b%b%b" % (_TAIL_START, self._number, _OK_TAIL)
        else:
            self._tail = self._last(code, text, metadata)
        self._pump()

    def cut(self, code: grpc.StatusCode, text: str) -> None:
        """Say a status now, dropping what still waits for room."""
        if self.is_open:
            self.close()
            self._part(self._last(code, text, ()))

    def close(self) -> None:
        """Say nothing more: nobody hears it."""
        self.is_open = False
        self._pending.clear()
        self._pending_bytes = 0
        self._tail = None
        self._wake()

    def room(self, more: int) -> None:
        """Note that the caller takes so many bytes more (or, below zero, fewer)."""
        self._room += more
        self._pump()

    def go_on(self) -> bool:
        """Send a turn's worth of what waits, and return whether more could be sent at once."""
        if not self._pending:
            return False
        self._pump(_TURN)
        return bool(self._pending) and self._room > 0

    def _pump(self, most: int = sys.maxsize) -> None:
        least = self._pending_bytes - most
        while self._pending and self._room > 0 and self._pending_bytes > least and not self._line.is_full:
            data = self._pending[0]
            size = min(len(data), self._room, LONGEST_FRAME)
            self._line.put(frame(DATA, 0, self._number, bytes(data[:size])), size)
            self._room -= size
            self._pending_bytes -= size
            if size == len(data):
                self._pending.popleft()
            else:
                self._pending[0] = memoryview(data)[size:]
        if self._pending_bytes <= _ENOUGH:
            self._wake()
        if self._tail is not None and not self._pending:
            tail, self._tail, self.is_open = self._tail, None, False
            self._part(tail)

    def _wake(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _last(self, code: grpc.StatusCode, text: str, metadata: Metadata) -> bytes:
        block = status_block(code, text, metadata)
        return heading(
            self._number, block if self._is_headed else self._line.head_start + self._head + block, is_last=True
        )

    def _part(self, tail: bytes) -> None:
        # No reset follows when the caller still speaks: gRPC's own client then takes its failed write for the call's
        # status if it sees that first. It gives the stream up by itself once it has read the status.
        self._line.put(tail, 0)
        self._line.forget(self._number)
        self._parted()
