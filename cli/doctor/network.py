"""Looks at ports and addresses for the doctor."""

from __future__ import annotations

import errno
import re
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cli.doctor.mesh import PortSeen

_CONNECT_TIMEOUT_S = 2.0
_OTLP_PORT = 4317
# Forwards published ports of containers, so that such a port is used by what runs inside.
_CONTAINER_FORWARDER = "docker-proxy"
_MODULE = re.compile(r"services\.[a-z_]+(\.host)?|facade")


def belongs_to_mesh(name: str, arguments: Sequence[str], folder: Path, root: Path) -> bool:
    """Return whether a process is one of the mesh's, run in the checkout at `root`, or forwards to a container."""
    # A service renames its process as soon as it is up; until then its arguments tell.
    known = name == "envoy" or name.startswith("omniserve-") or any(_MODULE.fullmatch(each) for each in arguments)
    return name == _CONTAINER_FORWARDER or (folder == root and known)


def look_at(port: PortSeen, host: str, *, root: Path) -> PortSeen:
    """Return the port with who has it."""
    refused = _bind_error(host, port.port)
    if refused is None:
        return port
    if refused != errno.EADDRINUSE:
        return replace(port, refused=errno.errorcode.get(refused, str(refused)))
    holder = _holder(port.port)
    if holder is None:
        return replace(port, holder="a process of another user")
    with suppress(psutil.Error, OSError):
        ours = belongs_to_mesh(holder.name(), holder.cmdline(), Path(holder.cwd()), root)
        return replace(port, holder=f"{holder.name()} (pid {holder.pid})", ours=ours)
    return replace(port, holder=f"pid {holder.pid}")


def _bind_error(host: str, port: int) -> int | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the servers do: connections of a former run that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
    return None


def _holder(port: int) -> psutil.Process | None:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and connection.pid and address and address.port == port:
                return psutil.Process(connection.pid)
    return None


def connect_error(endpoint: str) -> str | None:
    """Return why nothing takes a connection at the address, or None when something does."""
    try:
        parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        host, port = parts.hostname, parts.port or _OTLP_PORT
    except ValueError as error:
        return str(error)
    if host is None:
        return "the address names no host"
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def environment_size(environ: Mapping[str, str]) -> int:
    """Return how many variables of ours are set."""
    return sum(name.startswith("OMNISERVE_") for name in environ)
