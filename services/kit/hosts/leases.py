"""Where the memory of models comes from: this service's own budget, or the broker that all processes of the box ask."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from services.kit import telemetry
from services.kit.hosts.core.claims import End, Want
from services.kit.hosts.served import Served

_log = telemetry.logger(__name__)


class NoRoomError(Exception):
    """Memory was refused for now. `room_mib`: what there is; None when nobody knows."""

    def __init__(self, message: str, room_mib: int | None) -> None:
        super().__init__(message)
        self.message = message
        self.room_mib = room_mib


@dataclass(slots=True, eq=False)
class Claim:
    """A lease as who lives on it sees it. `pid`: asked for the process that allocates; `on_lost`: told when it is over too early.

    `end`, `reclaim_id`: what is said when it is given back. `lease_id`: of the broker's, empty without one. `news`: set when there is something to tell the broker now.
    """

    pid: Callable[[], int | None]
    on_lost: Callable[[str], None]
    end: End = End.DONE
    reclaim_id: str = ""
    lease_id: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Ear(Protocol):
    """Who hears that another process needs memory."""

    def __call__(self, claim: Claim, reclaim_id: str) -> "Yield":
        """Begin to give the claim's memory back, or say why not."""


@dataclass(frozen=True, slots=True)
class Yield:
    """`begun`: the memory is being given back; else it never is (`pinned`), or not now."""

    begun: bool
    pinned: bool = False


class Leases(Protocol):
    """Where memory comes from."""

    def size_mib(self, served: Served) -> int:
        """Return how much memory a model needs to be loaded."""

    def want(self, served: Served, *, size_mib: int, rank: int, wait_s: float, reload_s: float | None) -> Want:
        """Return what to ask for."""

    def expect(self, served: Served) -> None:
        """Know that a model may be loaded soon."""

    def lease(self, want: Want, claim: Claim) -> AbstractAsyncContextManager[None]:
        """Hold memory for the length of the block. Raises NoRoomError, and DomainError `no_capacity` when asking again is vain."""

    async def run(self, ear: Ear) -> None:
        """Hear what others need, for ever."""


class OwnBudget:
    """Memory that nobody else decides about: the residency's own budget is all there is."""

    def size_mib(self, served: Served) -> int:
        """See Leases: its files and its cache."""
        return served.need_mib

    def want(self, served: Served, *, size_mib: int, rank: int, wait_s: float, reload_s: float | None) -> Want:
        """See Leases."""
        return Want(served.name, size_mib, "", rank, wait_s, reclaimable=False, reload_s=reload_s)

    def expect(self, served: Served) -> None:
        """See Leases: there is nothing to prepare."""

    @asynccontextmanager
    async def lease(self, want: Want, claim: Claim) -> AsyncIterator[None]:  # noqa: ARG002 - see Leases
        """See Leases."""
        _log.info("memory charged", model=want.model, size_mib=want.size_mib)
        try:
            yield
        finally:
            _log.info("memory credited", model=want.model, size_mib=want.size_mib)

    async def run(self, ear: Ear) -> None:
        """See Leases: there is nobody to hear."""
