"""Pictures as files, named by their content, and the key that signs their URLs."""

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from services.jobs.core.images import Span
from services.kit.errors import DomainError, Reason

_KEY_BYTES: Final = 32
_CHUNK: Final = 1024 * 1024
_PART: Final = ".part"


class Media:
    """A folder of files. Raises DomainError no_capacity when the disk is full or broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, digest: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        path = self._folder / digest
        if path.exists():
            return
        part = path.with_suffix(_PART)
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DomainError(Reason.NO_CAPACITY, f"the picture cannot be kept: {error.strerror}") from error

    def remove(self, digests: Iterable[str]) -> None:
        """Remove files; those that are being read are read to their end."""
        for digest in digests:
            (self._folder / digest).unlink(missing_ok=True)

    def keep_only(self, digests: Iterable[str]) -> None:
        """Remove every file but those."""
        self.remove({each.name for each in self._folder.iterdir()} - set(digests))

    def open(self, digest: str) -> "Reading | None":
        """Return a file, None when it is not there."""
        try:
            return Reading(os.open(self._folder / digest, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None


class Reading:
    """A file that is being read."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "rb")
        self.modified_s = int(os.fstat(descriptor).st_mtime)

    def pieces(self, span: Span) -> Iterator[bytes]:
        """Yield a part of it in pieces of at most 1 MiB."""
        self._file.seek(span.first)
        left = span.length
        while left > 0 and (piece := self._file.read(min(left, _CHUNK))):
            left -= len(piece)
            yield piece

    def close(self) -> None:
        """Close it."""
        self._file.close()


def signing_key(path: Path) -> bytes:
    """Return the key that signs URLs, made at the first start; whoever removes its file ends all URLs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
        path.unlink()  # a start was cut off while it wrote
        return signing_key(path)
    with os.fdopen(descriptor, "wb") as file:
        key = secrets.token_bytes(_KEY_BYTES)
        file.write(key)
    return key
