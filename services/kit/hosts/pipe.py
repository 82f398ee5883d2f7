"""A host's end of the socket to its service: blocking, and the end of the process when the service is gone."""

import os
import socket
from typing import Final

import msgspec

from services.kit.hosts.core.framing import encode

_RECEIVE_BYTES: Final = 1 << 18


class Pipe:
    """The socket to the service."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        """Return the next bytes; ends the process when the service is gone."""
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        return data

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; ends the process when the service is gone."""
        try:
            self._connection.sendall(encode(message))
        except OSError:
            os._exit(0)
