"""A file whose changes count while the service runs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from services.kit import keyring, telemetry

LOOKED_EVERY_S: Final = 0.5
"""How often the file is looked at."""
_log = telemetry.logger(__name__)
T = TypeVar("T")


class Followed(Generic[T]):
    """Follows a file: `read` says what it holds, beside the event loop; `use` takes that.

    What `read` raises of `refusals` is told to the log, and what was in use goes on. `path` None: only `poke` counts.
    """

    def __init__(
        self,
        path: Path | None,
        read: Callable[[], T],
        use: Callable[[T], None],
        *,
        refusals: tuple[type[Exception], ...],
    ) -> None:
        self._path = path
        self._read = read
        self._use = use
        self._refusals = refusals
        self._seen = self._look()
        self._hurry = asyncio.Event()

    def poke(self) -> None:
        """Read the file again, changed or not, as SIGHUP asks."""
        self._hurry.set()

    async def follow(self) -> None:
        """Follow the file, for ever."""
        while True:
            try:
                async with asyncio.timeout(LOOKED_EVERY_S):
                    await self._hurry.wait()
            except TimeoutError:
                if self._look() == self._seen:
                    continue
            self._hurry.clear()
            self._seen = self._look()
            try:
                found = await asyncio.to_thread(self._read)
            except self._refusals as error:
                _log.error(
                    "the file cannot be used; what was read before goes on", path=str(self._path), error=str(error)
                )
                continue
            self._use(found)

    def _look(self) -> keyring.Version | None:
        return None if self._path is None else keyring.version(self._path)
