"""Whom to ask for memory back: tenants that offered it, worst tier first, cheapest to load again first. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from services.vram.core.model import Held, Lease, Tier


class Reason(IntEnum):
    """Why memory is asked back. The numbers are the contract's."""

    TENANT_WAITS = 1
    OPERATOR = 2


class Answer(IntEnum):
    """What a tenant did about it. The numbers are the contract's."""

    FREED = 1
    WORKING = 2
    BUSY = 3
    PINNED = 4


REFUSALS: Final = frozenset({Answer.BUSY, Answer.PINNED})


@dataclass(frozen=True, slots=True)
class Reclaim:
    """An open request. `ticket`: who waits for it; 0 when nobody does."""

    reclaim_id: str
    lease_id: str
    tenant: str
    device: str
    size_mib: int
    reason: Reason
    tier: Tier
    ticket: int
    until: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """A lease to be asked for memory on a device."""

    lease: Lease
    device: str
    size_mib: int


def choose(
    candidates: Iterable[tuple[Lease, Held]], missing_mib: int, *, tier: Tier, tenant: str, spared: Iterable[str]
) -> list[Chosen]:
    """Return which leases to ask until the missing memory is covered; all that may be asked when it cannot be.

    `candidates`: with what each holds on the device. `tier`, `tenant`: of who needs the memory; better tiers and its own
    leases are left alone, and so are the `spared`: asked already, or unwilling.
    """
    left_alone = set(spared)
    open_to_it = [
        (lease, held)
        for lease, held in candidates
        if lease.reclaimable and lease.tier <= tier and lease.tenant != tenant and lease.lease_id not in left_alone
    ]
    open_to_it.sort(key=lambda each: (each[0].tier, _cost(each[0]), each[0].granted_at))
    chosen: list[Chosen] = []
    for lease, held in open_to_it:
        if missing_mib <= 0:
            break
        chosen.append(Chosen(lease, held.device, min(missing_mib, held.size_mib)))
        missing_mib -= held.size_mib
    return chosen


class Reclaims:
    """The open requests, and who refused whom."""

    def __init__(self) -> None:
        self.open: dict[str, Reclaim] = {}
        self._refused: dict[int, set[str]] = {}

    def add(self, reclaim: Reclaim) -> None:
        """Open a request."""
        self.open[reclaim.reclaim_id] = reclaim

    def of_lease(self, lease_id: str) -> Reclaim | None:
        """Return the open request to a lease, or None."""
        return next((each for each in self.open.values() if each.lease_id == lease_id), None)

    def expected_mib(self, ticket: int) -> Mapping[str, int]:
        """Return what open requests for a waiter may bring, by device."""
        found: dict[str, int] = {}
        for each in self.open.values():
            if each.ticket == ticket:
                found[each.device] = found.get(each.device, 0) + each.size_mib
        return found

    def spared(self, ticket: int) -> set[str]:
        """Return the leases not to ask (again) for a waiter."""
        return {each.lease_id for each in self.open.values()} | self._refused.get(ticket, set())

    def answer(self, reclaim_id: str, answer: Answer) -> Reclaim | None:
        """Take an answer; return the request it closes, or None while it stays open or is not known."""
        reclaim = self.open.get(reclaim_id)
        if reclaim is None or answer is Answer.WORKING:
            return None
        del self.open[reclaim_id]
        if answer in REFUSALS and reclaim.ticket:
            self._refused.setdefault(reclaim.ticket, set()).add(reclaim.lease_id)
        return reclaim

    def forget_lease(self, lease_id: str) -> list[Reclaim]:
        """Close the requests to a lease that is over; return them."""
        return self._close(lambda each: each.lease_id == lease_id)

    def forget_waiter(self, ticket: int) -> list[Reclaim]:
        """Close the requests for a waiter that has gone; return them."""
        self._refused.pop(ticket, None)
        return self._close(lambda each: each.ticket == ticket)

    def expire(self, now: float) -> list[Reclaim]:
        """Close the requests whose answer is of no use any more; return them. Who did not answer is not asked again."""
        late = self._close(lambda each: each.until <= now)
        for each in late:
            if each.ticket:
                self._refused.setdefault(each.ticket, set()).add(each.lease_id)
        return late

    def _close(self, closes: Callable[[Reclaim], bool]) -> list[Reclaim]:
        closed = [each for each in self.open.values() if closes(each)]
        for each in closed:
            del self.open[each.reclaim_id]
        return closed


def _cost(lease: Lease) -> float:
    return math.inf if lease.reload_cost_s is None else lease.reload_cost_s
