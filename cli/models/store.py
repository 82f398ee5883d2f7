"""The models folder: is there room, is a file what it should be, and how it gets its final name."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import TYPE_CHECKING

from cli.errors import CliError
from cli.models.gguf import GgufError, read_header
from cli.terminal import human_size

if TYPE_CHECKING:
    from pathlib import Path

    from cli.models.gguf import GgufHeader

_CHUNK_BYTES = 1 << 20
# Left free on purpose: a disk filled to the last byte stops journals and logs too.
_KEEP_FREE_BYTES = 256 << 20


def prepare(folder: Path) -> None:
    """Make the models folder. Raises CliError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot make the models folder {folder}: {error.strerror}; set OMNISERVE_MODELS_DIR") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CliError(f"the models folder {folder} cannot be written; set OMNISERVE_MODELS_DIR")


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise CliError when `needed_bytes` more do not fit beside what must stay free."""
    free = shutil.disk_usage(folder).free
    if needed_bytes + _KEEP_FREE_BYTES > free:
        raise CliError(
            f"not enough disk space in {folder}: {human_size(needed_bytes)} to fetch and {human_size(_KEEP_FREE_BYTES)} to keep free, "
            f"but only {human_size(free)} free",
        )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_sha1_of(path: Path) -> str:
    """Return the id that git gives to the file's content: the hub's checksum of small files."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def publish(finished: Path, target: Path) -> GgufHeader:
    """Give a downloaded file its final name in one step, after its header was read.

    Raises CliError when it is no whole GGUF file; `finished` is removed then, since resuming could not help.
    """
    try:
        header = read_header(finished)
    except GgufError as error:
        finished.unlink()
        raise CliError(f"{target.name}: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    finished.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return header
