"""A download that is not finished: `<name>.part` and, beside it, what it was begun from.

The part file is locked while a command writes to it, so that two pulls of one file never mix their bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from cli.errors import CliError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Origin:
    """What a part belongs to: the address, the version of the file there, and its size in bytes."""

    url: str
    validator: str | None
    total: int | None


class PartFile:
    """An open, locked part file with the running SHA-256 of its content."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self._origin_path = target.with_name(target.name + ".part.json")
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise CliError(f"another command is fetching {target.name} just now") from error
        self.size = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        if os.fstat(self._file.fileno()).st_size == 0:
            self.discard()  # nothing came: leave nothing behind
        self._file.close()

    def resume(self, url: str) -> Origin | None:
        """Take over what an earlier command left of `url`; returns its origin, or None after starting from nothing."""
        origin = self._read_origin()
        if origin is None or origin.url != url:
            self.start_over()
            return None
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            self._digest.update(chunk)
            self.size += len(chunk)
        return origin

    def start_over(self) -> None:
        """Throw away what is there."""
        self._file.truncate(0)
        self.size = 0
        self._digest = hashlib.sha256()

    def belongs_to(self, origin: Origin) -> None:
        """Remember what the part is begun from, so that a later command may resume it."""
        beside = self._origin_path.with_name(self._origin_path.name + ".new")
        beside.write_text(json.dumps(asdict(origin)), encoding="utf-8")
        beside.replace(self._origin_path)

    def write(self, piece: bytes) -> None:
        """Append bytes."""
        self._file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)

    def finish(self) -> str:
        """Bring every byte to the disk and return the SHA-256 of the whole."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Remove the part and its origin: resuming it could not help."""
        self.path.unlink(missing_ok=True)
        self.forget_origin()

    def forget_origin(self) -> None:
        """Remove the note of the origin: the part got its final name."""
        self._origin_path.unlink(missing_ok=True)

    def _read_origin(self) -> Origin | None:
        try:
            return Origin(**json.loads(self._origin_path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
