"""Kept pictures: rows in the journal and files beside it, which one thread, the journal's, writes."""

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.jobs.adapters import images
from services.jobs.adapters.journal import Journal
from services.jobs.adapters.media import Media, Reading
from services.jobs.core.images import Image, ImageBounds, check_seer, check_signed, check_ttl, signed_url, unknown_image
from services.kit import telemetry
from services.kit.clock import Clock
from services.kit.errors import DomainError

_log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Signed:
    """A picture's URL. `expires_ms`: when it ends, milliseconds since 1970."""

    image_id: str
    url: str
    expires_ms: int


class Pictures:
    """Keeps pictures. `base`: where callers reach the front door; `key`: signs URLs."""

    def __init__(
        self, journal: Journal, media: Media, clock: Clock, bounds: ImageBounds, *, base: str, key: bytes
    ) -> None:
        self.bounds = bounds
        self._journal = journal
        self._media = media
        self._clock = clock
        self._base = base
        self._key = key

    def _now_ms(self) -> int:
        return int(self._clock.wall() * 1000)

    async def save(self, data: bytes, media_type: str, principal: str, image_id: str, ttl_s: int | None) -> Signed:
        """Keep a picture and sign a URL. `image_id`: its id unless the same content has one. Raises DomainError."""
        now_ms = self._now_ms()
        expires_ms = now_ms + check_ttl(ttl_s, self.bounds)
        digest = hashlib.sha256(data).hexdigest()
        image = Image(image_id, principal, digest, media_type, len(data), now_ms, expires_ms)

        def work(db: sqlite3.Connection) -> str:
            found, gone = images.save(db, image, self.bounds.total_bytes)
            self._media.write(digest, data)  # first: where that fails, those that would make room for it stay
            self._media.remove(gone)
            return found

        found = await self._journal.run(work)
        return Signed(found, signed_url(self._base, self._key, found, expires_ms), expires_ms)

    @asynccontextmanager
    async def opened(
        self, image_id: str, expires_ms: int, signature: str, client: str
    ) -> AsyncIterator[tuple[Image, Reading]]:
        """Open a picture for whom its URL is. Raises DomainError not_found."""
        now_ms = self._now_ms()
        check_signed(self._key, image_id, expires_ms, signature, now_ms=now_ms)
        image = await self._journal.run(lambda db: images.find(db, image_id, now_ms=now_ms))
        if image is None:
            raise unknown_image(image_id)
        check_seer(image, client)
        reading = self._media.open(image.digest)
        if reading is None:
            raise unknown_image(image_id)
        try:
            yield image, reading
        finally:
            reading.close()

    async def tidy(self) -> None:
        """Remove files that the journal does not know: of a save that was cut off."""
        await self._journal.run(lambda db: self._media.keep_only(images.known(db)))

    async def expire(self, *, every_s: float) -> None:
        """Remove what is over, again and again, until cancelled."""
        while True:
            try:
                await self._journal.run(self._forget_what_is_over)
            except DomainError as error:  # a full disk, say: what can be seen ends by itself all the same
                _log.warning("pictures that are over were not removed", why=error.message)
            await asyncio.sleep(every_s)

    def _forget_what_is_over(self, db: sqlite3.Connection) -> None:
        self._media.remove(images.expire(db, now_ms=self._now_ms()))


async def in_pieces(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what a file's reading yields without keeping the event loop from others."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
