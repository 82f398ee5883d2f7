"""Bytes too large for messages, passed between a service and a host through memory that both have open.

The memory is anonymous and lives as long as either process: nothing is left behind, whoever dies. Who sends puts bytes
down and names the place in a message; who receives takes them. Places are used again after `clear`.
"""

import os
from typing import Self


class Board:
    """One direction. `descriptor`: of the memory; a host inherits it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._end = 0

    @classmethod
    def new(cls, name: str) -> Self:
        """Return a board on memory of its own. `name` is for who looks at the process's open files."""
        return cls(os.memfd_create(name, os.MFD_CLOEXEC))

    def put(self, data: bytes | memoryview) -> int:
        """Put bytes down and return where. Raises OSError when there is no memory for them."""
        offset, view = self._end, memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(self.descriptor, view[done:], offset + done)
        self._end = offset + len(view)
        return offset

    def take(self, offset: int, size: int) -> bytes:
        """Return bytes that were put down. Raises ValueError when there are fewer."""
        parts = []
        while size > 0:
            part = os.pread(self.descriptor, size, offset)
            if not part:
                raise ValueError(f"the board ends {size} bytes before what was asked for")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def clear(self) -> None:
        """Give the memory back and begin anew; what was not taken is gone."""
        os.ftruncate(self.descriptor, 0)
        self._end = 0

    def close(self) -> None:
        """Close this process's end."""
        os.close(self.descriptor)
