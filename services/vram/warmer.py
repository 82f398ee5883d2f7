"""Keeps weights warm in the page cache: one task that goes through the set, chunk by chunk, and stops at the floor."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from services.kit import telemetry
from services.vram.adapters import page_cache
from services.vram.adapters.driver import DriverError
from services.vram.adapters.host_memory import HostMemory
from services.vram.core.warming import Chunk, File, TooManyFilesError, WarmSet

CHUNK_BYTES: Final = 64 * 1024 * 1024
LOOKED_EVERY_S: Final = 2.0
"""How often the memory is looked at while a file waits for some."""
_log = telemetry.logger(__name__)


class UnfitPathError(Exception):
    """A path that is not kept warm; `place` in the request, `is_missing` when there is no such file."""

    def __init__(self, place: int, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.place = place
        self.is_missing = is_missing


class Warmer:
    """Owns the set. `folders`: those whose files may be in it; empty lets in any."""

    def __init__(self, host: HostMemory, *, enabled: bool, keep_free_percent: int, folders: Sequence[Path]) -> None:
        self.enabled = enabled
        self.keep_free_percent = keep_free_percent
        self._host = host
        self._folders = tuple(folder.resolve() for folder in folders)
        self._set = WarmSet(chunk_bytes=CHUNK_BYTES, keep_free_percent=keep_free_percent)
        self._news = asyncio.Event()

    @property
    def files(self) -> tuple[File, ...]:
        """The set, in order."""
        return self._set.files

    def check(self, paths: Sequence[str]) -> list[tuple[str, int]]:
        """Return where paths lead, and the files' sizes, bytes. Looks at the disk; raises UnfitPathError."""
        return [self._checked(place, path) for place, path in enumerate(paths)]

    def add(self, checked: Sequence[tuple[str, int]], source: str) -> list[File]:
        """Add files that were checked. Raises UnfitPathError when the set is full; those before are in it then."""
        added = []
        for place, (path, size) in enumerate(checked):
            try:
                added.append(self._set.add(path, size, source))
            except TooManyFilesError as error:
                raise UnfitPathError(place, str(error)) from None
        self._news.set()
        return added

    def _checked(self, place: int, path: str) -> tuple[str, int]:
        if not path.startswith("/") or "\0" in path:
            raise UnfitPathError(place, f"{path[:200]!r} is no absolute path")
        real = Path(path).resolve()
        if self._folders and not any(real.is_relative_to(folder) for folder in self._folders):
            raise UnfitPathError(place, f"{path[:200]!r} is outside OMNISERVE_VRAM_WARM_DIRS")
        if not real.exists():
            raise UnfitPathError(place, f"there is no file {path[:200]!r}", is_missing=True)
        if not real.is_file():
            raise UnfitPathError(place, f"{path[:200]!r} is not a regular file")
        return str(real), real.stat().st_size

    async def run(self) -> None:
        """Warm what is in the set, for ever."""
        while True:
            self._news.clear()
            chunk = await self._next() if self.enabled else None
            if chunk is not None:
                await self._advise(chunk)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOKED_EVERY_S if self._set.is_stopped else None):
                    await self._news.wait()

    async def _next(self) -> Chunk | None:
        try:
            total, available = await asyncio.to_thread(self._host.available)
        except DriverError:
            return None  # who does not know what is free takes nothing
        return self._set.next(total=total, available=available)

    async def _advise(self, chunk: Chunk) -> None:
        try:
            await asyncio.to_thread(page_cache.advise, chunk.path, chunk.start, chunk.size)
        except OSError as error:
            self._set.failed(chunk.path, str(error))
            _log.warning("a file cannot be kept warm", path=chunk.path, why=str(error))
            return
        self._set.advised(chunk)

    async def measure(self) -> None:
        """Look how much of each file the page cache has."""
        for file in self.files:
            with suppress(OSError, ValueError):
                self._set.measured(file.path, await asyncio.to_thread(page_cache.cached_bytes, file.path))
