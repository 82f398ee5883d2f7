"""The files that are kept warm in the page cache: whose turn it is, and when to stop for lack of memory. Pure."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MOST_FILES: Final = 256


class State(IntEnum):
    """How far a file is. The numbers are the contract's."""

    PENDING = 1
    WARMING = 2
    WARM = 3
    STOPPED_AT_FLOOR = 4
    FAILED = 5


@dataclass(slots=True)
class File:
    """One file of the set, sizes in bytes. `advised`: how far the kernel was told to read it; `cached`: as last measured."""

    path: str
    size: int
    source: str
    state: State = State.PENDING
    advised: int = 0
    cached: int | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is to be read ahead next, bytes."""

    path: str
    start: int
    size: int


class TooManyFilesError(Exception):
    """The set is full."""


class WarmSet:
    """The files in the order in which they are warmed, a chunk at a time. `keep_free_percent`: of the memory in all."""

    def __init__(self, *, chunk_bytes: int, keep_free_percent: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._keep_free_percent = keep_free_percent
        self._files: dict[str, File] = {}

    @property
    def files(self) -> tuple[File, ...]:
        """The set, in order."""
        return tuple(self._files.values())

    def add(self, path: str, size: int, source: str) -> File:
        """Add a file, or begin anew with one that is there: it is read ahead again where it went cold.

        Raises TooManyFilesError.
        """
        file = self._files.get(path)
        if file is None:
            if len(self._files) >= MOST_FILES:
                raise TooManyFilesError(f"{MOST_FILES} files are kept warm already")
            file = self._files[path] = File(path, size, source)
        file.size, file.state, file.advised, file.failure = size, State.PENDING, 0, ""
        return file

    def next(self, *, total: int, available: int) -> Chunk | None:
        """Return what to read ahead now; None when all is warm, or the memory that must stay free would be touched."""
        for file in self._files.values():
            if file.state in {State.WARM, State.FAILED}:
                continue
            size = min(self._chunk_bytes, file.size - file.advised)
            if (available - size) * 100 < total * self._keep_free_percent:
                file.state = State.STOPPED_AT_FLOOR
                return None
            file.state = State.WARMING
            return Chunk(file.path, file.advised, size)
        return None

    @property
    def is_stopped(self) -> bool:
        """Whether a file waits for memory."""
        return any(file.state is State.STOPPED_AT_FLOOR for file in self._files.values())

    def advised(self, chunk: Chunk) -> None:
        """Note that a chunk is being read ahead. One of a file that was begun anew meanwhile counts for nothing."""
        file = self._files[chunk.path]
        if file.advised != chunk.start:
            return
        file.advised += chunk.size
        if file.advised >= file.size:
            file.state = State.WARM

    def failed(self, path: str, why: str) -> None:
        """Note that a file cannot be read."""
        file = self._files[path]
        file.state, file.failure = State.FAILED, why

    def measured(self, path: str, cached: int) -> None:
        """Note how much of a file the page cache has."""
        self._files[path].cached = cached
