"""Who watches: a mailbox for each stream, bounded, so that one that does not read costs a gap and no memory."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from services.vram.core.ledger import Ended
from services.vram.core.model import Lease, Refusal
from services.vram.core.reclaim import Reclaim

MOST_UNREAD: Final = 256


@dataclass(frozen=True, slots=True)
class Gap:
    """Events were missed, or none was heard yet: the whole state is wanted."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A reclaim request is of no interest any more."""

    reclaim: Reclaim


@dataclass(frozen=True, slots=True)
class DeviceLook:
    """A device's account has changed."""

    device: str


Event = DeviceLook | Gap | Reclaim | Withdrawn | Lease | Ended | Refusal


@dataclass(slots=True, eq=False)
class Watcher:
    """One stream. `tenant` "" hears no reclaim requests; `events`: hears what happens to all leases."""

    tenant: str
    events: bool
    _unread: deque[Event] = field(default_factory=lambda: deque([Gap()]))
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False

    def put(self, event: Event) -> None:
        """Add an event; one too many makes a gap of what only tells, and leaves what asks for something."""
        if len(self._unread) >= MOST_UNREAD:
            asking = [each for each in self._unread if isinstance(each, Reclaim | Withdrawn)]
            self._unread = deque([Gap(), *asking[-MOST_UNREAD // 2 :]])
        self._unread.append(event)
        self._news.set()

    def close(self) -> None:
        """Let the stream end when everything is read."""
        self._is_over = True
        self._news.set()

    async def read(self) -> AsyncIterator[Event]:
        """Give the events as they come until the stream is closed."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if self._is_over:
                return
            self._news.clear()
            await self._news.wait()


class Watchers:
    """All of them."""

    def __init__(self) -> None:
        self._all: list[Watcher] = []

    def add(self, watcher: Watcher) -> None:
        """Let a stream hear what happens."""
        self._all.append(watcher)

    def remove(self, watcher: Watcher) -> None:
        """Let it hear no more."""
        self._all.remove(watcher)

    def has(self, tenant: str) -> bool:
        """Return whether anybody would hear a reclaim request to a tenant."""
        return any(each.tenant == tenant for each in self._all)

    def requested(self, reclaim: Reclaim) -> None:
        """Tell a tenant to make room."""
        for each in self._all:
            if each.tenant == reclaim.tenant:
                each.put(reclaim)

    def withdrawn(self, reclaim: Reclaim) -> None:
        """Tell a tenant that it need not make room any more."""
        for each in self._all:
            if each.tenant == reclaim.tenant:
                each.put(Withdrawn(reclaim))

    def changed(self, lease: Lease) -> None:
        """Tell that a lease came or changed."""
        self._tell(lease)

    def ended(self, ended: Ended) -> None:
        """Tell that a lease went."""
        self._tell(ended)

    def denied(self, refusal: Refusal) -> None:
        """Tell that somebody was refused."""
        self._tell(refusal)

    def close(self) -> None:
        """End all streams."""
        for each in self._all:
            each.close()

    def _tell(self, event: Event) -> None:
        for each in self._all:
            if each.events:
                each.put(event)
