"""A host process as the service sees it: started by exec, spoken to without blocking, dead when its socket closes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

import msgspec

from services.kit import telemetry
from services.kit.hosts.core.framing import Frames, WireError, encode

M = TypeVar("M")

_ROOT: Final = Path(__file__).resolve().parents[3]
_SOCKET_BYTES: Final = 1 << 20
_REAP_S: Final = 5.0
_log = telemetry.logger(__name__)


class HostProcess(Generic[M]):
    """One running host. `on_message` is called for each of its messages, in the event loop."""

    def __init__(self, process: subprocess.Popen[bytes], role: str) -> None:
        self._process = process
        self._role = role
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()

    @classmethod
    async def start(
        cls,
        program: str,
        role: str,
        kind: Any,  # noqa: ANN401 - a union of message types
        on_message: Callable[[M], None],
        *,
        environ: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> Self:
        """Start `python -m <program> <role>` with `environ` added to this process's environment.

        The socket's number follows on the command line, then those of `descriptors`, which the host inherits.
        """
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        passed = (theirs.fileno(), *descriptors)
        command = [sys.executable, "-m", program, role, *map(str, passed)]
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond, and never forks: Python spawns by vfork
                command,
                pass_fds=passed,
                cwd=_ROOT,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        host = cls(process, role)
        frames: Frames[M] = Frames(kind)
        loop = asyncio.get_running_loop()
        ours.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        transport, _ = await loop.create_unix_connection(lambda: _Reader(host, frames, on_message), sock=ours)
        host._transport = transport
        return host

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; to a dead host it is lost, and `ended` says so."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def closed(self) -> None:
        """Note that the socket is closed."""
        self._closed.set()

    def kill(self) -> None:
        """End the process at once."""
        if self._process.returncode is None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed, by whichever side."""
        await self._closed.wait()

    async def ended(self) -> str:
        """Wait until the host is dead and return how it died."""
        await self._closed.wait()
        return await self._reap()

    async def stop(self) -> None:
        """Close the socket, which ends the host, and wait for that; kill it if it does not listen."""
        if self._transport is not None:
            self._transport.abort()
        await self._reap()

    async def _reap(self) -> str:
        # Without its socket a host is of no use to anybody; it has its moment to end by itself.
        waiting = asyncio.get_running_loop().run_in_executor(None, self._wait)
        code = await asyncio.shield(waiting)
        return _how(code)

    def _wait(self) -> int:
        try:
            return self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            _log.warning("host did not end by itself", role=self._role, pid=self.pid)
            self._process.kill()
            return self._process.wait()


class _Reader(asyncio.Protocol, Generic[M]):
    def __init__(self, host: HostProcess[M], frames: Frames[M], on_message: Callable[[M], None]) -> None:
        self._host = host
        self._frames = frames
        self._on_message = on_message

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except WireError:
            _log.exception("host speaks another language", pid=self._host.pid)
            self._host.kill()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._host.closed()


def _how(code: int) -> str:
    if code >= 0:
        return f"it ended with status {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"
