"""Adapters on disk: found without ever leaving their folder, and copied before the engine reads them.

The engine opens files by their names, and between a look at a name and its opening another file may stand there. So a file is
opened once, every part of its name by itself and never through a link, checked and hashed while it is copied, and the engine
is given the copy, which is named by its content.
"""

import hashlib
import os
import shutil
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from services.diffusion.core.family import check_lora
from services.diffusion.core.header import HeaderError, read_header
from services.diffusion.core.loras import ENDINGS, LoraName, chosen
from services.kit.errors import DomainError, Reason

_PLAIN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER: Final = _PLAIN | os.O_DIRECTORY
_CHUNK: Final = 1 << 20
_MOST_COPIES: Final = 32
_Identity = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class LoraFile:
    """An adapter that the engine may load. `digest`: SHA-256 of its content."""

    path: str
    digest: str
    scale: float


class LoraFiles:
    """Adapters below `folder`, None for none; `copies`: where the engine reads them, for this process alone.

    May be used by several threads at once.
    """

    def __init__(self, folder: Path | None, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self._known: OrderedDict[_Identity, str] = OrderedDict()
        self._lock = threading.Lock()
        shutil.rmtree(copies, ignore_errors=True)  # of a former process

    @property
    def has_folder(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def find(self, names: Sequence[LoraName]) -> tuple[LoraFile, ...]:
        """Return adapters as the engine may read them. Raises DomainError, naming the field: `not_found`, `unsupported`."""
        return tuple(self._found(each) for each in names)

    def _found(self, name: LoraName) -> LoraFile:
        try:
            with self._opened(name) as file, self._lock:
                digest, path = self._copied(file)
        except HeaderError as error:
            message = f"'{name.field}' is no adapter that can be used: {error}"
            raise DomainError(Reason.UNSUPPORTED, message, field=name.field) from error
        except (OSError, ValueError) as error:
            message = f"there is no adapter {(name.path or name.lora_id)[:100]!r} that '{name.field}' names"
            raise DomainError(Reason.NOT_FOUND, message, field=name.field) from error
        return LoraFile(str(path), digest, name.scale)

    @contextmanager
    def _opened(self, name: LoraName) -> Iterator[BinaryIO]:
        if name.path is not None:
            descriptor = os.open(name.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        else:
            descriptor = self._below(name)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is no file")
            yield file

    def _below(self, name: LoraName) -> int:
        """Open an adapter below the folder: a file called by its id, or one in a folder of that name."""
        if self._folder is None:
            raise OSError("there is no folder")
        root = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            if name.filename is None:
                for ending in ("", *ENDINGS):
                    if ending or name.lora_id.lower().endswith(ENDINGS):
                        with suppress(FileNotFoundError):
                            return os.open(f"{name.lora_id}{ending}", _PLAIN, dir_fd=root)
            folder = os.open(name.lora_id, _FOLDER, dir_fd=root)
            try:
                file = name.filename or chosen(os.listdir(folder), f"{name.field}.catalogue.lora_id")  # noqa: PTH208 - of a descriptor
                return os.open(file, _PLAIN, dir_fd=folder)
            finally:
                os.close(folder)
        finally:
            os.close(root)

    def _copied(self, file: BinaryIO) -> tuple[str, Path]:
        """Return the digest of a file and where its copy is. Raises HeaderError, OSError."""
        seen = os.fstat(file.fileno())
        identity = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
        digest = self._known.get(identity)
        if digest is not None and self._copy_of(digest).exists():
            self._known.move_to_end(identity)
            return digest, self._copy_of(digest)
        self._copies.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._copies / f".{os.getpid()}-{os.urandom(8).hex()}"
        try:
            digest = self._copy(file, part)
            part.replace(self._copy_of(digest))
        finally:
            part.unlink(missing_ok=True)
        self._known[identity] = digest
        self._drop_oldest()
        return digest, self._copy_of(digest)

    @staticmethod
    def _copy(file: BinaryIO, part: Path) -> str:
        digest = hashlib.sha256()
        with part.open("xb") as copy:
            while data := file.read(_CHUNK):
                digest.update(data)
                copy.write(data)
        with part.open("rb") as copy:  # what was copied is what is checked, whatever happens to the original
            check_lora(read_header(copy, part.stat().st_size))
        return digest.hexdigest()

    def _copy_of(self, digest: str) -> Path:
        return self._copies / f"{digest}.lora"

    def _drop_oldest(self) -> None:
        while len(self._known) > _MOST_COPIES:
            _, digest = self._known.popitem(last=False)
            if digest not in self._known.values():
                self._copy_of(digest).unlink(missing_ok=True)
