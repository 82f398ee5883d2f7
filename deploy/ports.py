"""Finds out before the start whether every port is free, and who has it if not."""

import errno
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Listen:
    """An address that a process of the mesh will listen on, and the variable that sets it."""

    host: str
    port: int
    variable: str


def problems(listens: Iterable[Listen]) -> list[str]:
    """Return one sentence for each address that cannot be bound, or that two processes would share."""
    found: list[str] = []
    seen: dict[int, Listen] = {}
    for each in listens:
        if (other := seen.setdefault(each.port, each)) is not each:
            found.append(f"port {each.port} is asked for twice: by {other.variable} and by {each.variable}")
        elif (problem := _problem(each)) is not None:
            found.append(problem)
    return found


def _problem(listen: Listen) -> str | None:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the servers do: connections of a former run that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return (
                    f"port {listen.port} is already in use{_holder(listen.port)}: choose another with {listen.variable}"
                )
            return f"cannot listen on {listen.host}:{listen.port} ({error.strerror}): see {listen.variable}"
    return None


def _holder(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
