"""Talks to supervisord over its Unix socket."""

import http.client
import xmlrpc.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from supervisor.xmlrpc import SupervisorTransport

DOOR: Final = "envoy"
"""The program that takes over from itself on SIGHUP, so that its ports are never closed."""


class NotRunningError(Exception):
    """No supervisord answers on the socket."""


class UnknownProgramError(Exception):
    """No such program; the message names those there are."""


@dataclass(frozen=True, slots=True)
class Process:
    """One program as supervisord sees it.

    `state`: STARTING, RUNNING, BACKOFF (waits before another start), STOPPING, STOPPED, EXITED or FATAL. `pid`: 0 while
    none runs. `ended_at`: seconds since 1970 when a process of it last ended, 0 if none has. `exit_status`: of that one.
    """

    name: str
    state: str
    pid: int
    ended_at: int
    exit_status: int
    spawn_error: str


class Supervisor:
    """A supervisord that answers on a socket. Every call raises NotRunningError when it does not."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def pid(self) -> int:
        """Return supervisord's process id."""
        with self._connected() as call:
            return int(call.getPID())

    def processes(self) -> dict[str, Process]:
        """Return every program by name, in the order they start."""
        with self._connected() as call:
            infos = cast("list[dict[str, Any]]", call.getAllProcessInfo())
        return {info["name"]: _process(info) for info in infos}

    def restart(self, name: str) -> None:
        """Stop a program (it drains) and start it again; the front door is replaced while it runs. Raises UnknownProgramError."""
        known = self.processes()
        if name not in known:
            raise UnknownProgramError(f"no program {name!r}; there are {', '.join(known)}")
        with self._connected() as call:
            if name == DOOR and known[name].state == "RUNNING":
                call.signalProcess(name, "HUP")
                return
            if known[name].state in {"RUNNING", "STARTING", "BACKOFF"}:
                call.stopProcess(name, True)  # noqa: FBT003 - XML-RPC has no names for arguments
            call.startProcess(name, False)  # noqa: FBT003 - as above

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        transport = SupervisorTransport(None, None, f"unix://{self._socket}")
        try:
            yield xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor
        except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise NotRunningError(f"no supervisord answers on {self._socket}: {error}") from error
        finally:
            transport.close()


def _process(info: dict[str, Any]) -> Process:
    return Process(
        name=info["name"],
        state=info["statename"],
        pid=info["pid"],
        ended_at=info["stop"],
        exit_status=info["exitstatus"],
        spawn_error=info["spawnerr"],
    )
