"""The account of one device: what is free, what is promised, and what that leaves.

The driver's figure is a moment old when it is used. A lease's claim (what it was granted and has not allocated) may
fall while the driver is being asked, because its tenant has just allocated it, or has left while its memory is still
taken. What a claim loses is therefore held back until a reading that began afterwards is there: no byte is then counted
twice for long, and none is ever counted not at all. Growing claims count at once.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.vram.core.model import Facts, Failure, Held, Item, Lease, Reading, Rules, Source, Tier, floor_for


@dataclass(slots=True)
class Account:
    """One device. `reading` is None while the driver's figures are not known; `failure` then says why, once asked."""

    facts: Facts
    reading: Reading | None = None
    failure: Failure | None = None
    granted_mib: int = 0
    promised_mib: int = 0
    _leases: dict[str, Lease] = field(default_factory=dict)
    _claims: dict[str, int] = field(default_factory=dict)
    _by_driver: dict[str, int] = field(default_factory=dict)
    _held_back: deque[tuple[int, int]] = field(default_factory=deque)
    _held_back_mib: int = 0
    _newest_mark: int = -1

    def room(self, tier: Tier, rules: Rules) -> int | None:
        """Return what a lease of the tier could get now; negative when promises exceed it, None when unknown."""
        if self.reading is None:
            return None
        taken = self.promised_mib + self._held_back_mib + rules.reserved_mib.get(self.facts.device, 0)
        return self.reading.free_mib - taken - floor_for(tier, rules.keep_free_mib)

    def held(self, lease: Lease) -> Held | None:
        """Return what a lease holds here, with what is known of it; None when it holds nothing here."""
        item = lease.on(self.facts.device)
        if item is None:
            return None
        if item.reported_mib is not None:
            return Held(item.device, item.size_mib, item.reported_mib, Source.TENANT)
        if lease.lease_id in self._by_driver:
            return Held(item.device, item.size_mib, self._by_driver[lease.lease_id], Source.DRIVER)
        return Held(item.device, item.size_mib, 0, Source.UNKNOWN)

    def leases(self) -> Iterable[Lease]:
        """Return the leases that hold something here, oldest first."""
        return self._leases.values()

    def is_as_new_as(self, mark: int) -> bool:
        """Return whether the driver was asked after everything up to a mark had happened."""
        return self.reading is not None and self.reading.mark >= mark

    def unaccounted_mib(self, pid: int) -> int:
        """Return what the driver attributes to a process beyond what its leases are known to have allocated."""
        if self.reading is None or self.reading.used_mib is None:
            return 0
        known = sum(
            held.materialised_mib
            for lease in self._leases.values()
            if lease.pid == pid and (held := self.held(lease)) is not None
        )
        return max(0, self.reading.used_mib.get(pid, 0) - known)

    def grant(self, lease: Lease, asked: int) -> None:
        """Add a new lease. `asked`: the mark of its ask; what the ask called allocated was so before."""
        item = lease.on(self.facts.device)
        if item is None:
            return
        self._leases[lease.lease_id] = lease
        self.granted_mib += item.size_mib
        self._set_claim(lease.lease_id, self._claim_of(lease, item))
        if item.reported_mib and not self.is_as_new_as(asked):
            self._hold_back(asked, item.reported_mib)

    def change(self, lease: Lease, mark: int) -> None:
        """Replace a lease's former state by a new one. `mark`: the ledger's, of this change."""
        item, before = lease.on(self.facts.device), self._leases.get(lease.lease_id)
        if item is None or before is None:
            return
        if before.pid != lease.pid:
            self._by_driver.pop(lease.lease_id, None)
        self.granted_mib += item.size_mib - _size(before, self.facts.device)
        self._leases[lease.lease_id] = lease
        lost = self._claims[lease.lease_id] - self._claim_of(lease, item)
        self._set_claim(lease.lease_id, self._claim_of(lease, item))
        self._hold_back(mark, lost)

    def restore(self, lease: Lease) -> None:
        """Add a lease of a former process, before anything was read."""
        item = lease.on(self.facts.device)
        if item is None:
            return
        self._leases[lease.lease_id] = lease
        self.granted_mib += item.size_mib
        self._set_claim(lease.lease_id, self._claim_of(lease, item))

    def remove(self, lease_id: str, mark: int) -> None:
        """Take a lease out; what it could still have allocated is held back until the driver was asked again."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        self.granted_mib -= _size(lease, self.facts.device)
        self._by_driver.pop(lease_id, None)
        claim = self._claims.pop(lease_id)
        self.promised_mib -= claim
        self._hold_back(mark, claim)

    def read(self, reading: Reading) -> None:
        """Take what the driver said; what changed before it was asked is in its figure."""
        if reading.mark < self._newest_mark:
            return  # a late one: what was held back since is gone already
        self.reading, self.failure, self._newest_mark = reading, None, reading.mark
        while self._held_back and self._held_back[0][0] <= reading.mark:
            self._held_back_mib -= self._held_back.popleft()[1]
        self._by_driver = self._attribute(reading)
        for lease in self._leases.values():
            item = lease.on(self.facts.device)
            if item is not None and item.reported_mib is None:
                self._set_claim(lease.lease_id, self._claim_of(lease, item))

    def fail(self, failure: Failure) -> None:
        """Forget the figures: nobody knows what is free."""
        self.reading, self.failure = None, failure
        self._by_driver.clear()
        for lease in self._leases.values():
            item = lease.on(self.facts.device)
            if item is not None:
                self._set_claim(lease.lease_id, self._claim_of(lease, item))

    def _attribute(self, reading: Reading) -> dict[str, int]:
        """Return the driver's figure by lease: what tenants reported comes off first, then the oldest lease is filled."""
        if reading.used_mib is None:
            return {}
        left = dict(reading.used_mib)
        silent: list[tuple[Lease, Item]] = []
        for lease in self._leases.values():
            item = lease.on(self.facts.device)
            if item is None or lease.pid not in left:
                continue
            if item.reported_mib is None:
                silent.append((lease, item))
            else:
                left[lease.pid] = max(0, left[lease.pid] - item.reported_mib)
        found: dict[str, int] = {}
        for lease, item in silent:
            found[lease.lease_id] = min(item.size_mib, max(0, left[lease.pid] - item.baseline_mib))
            left[lease.pid] -= found[lease.lease_id]
        return found

    def _claim_of(self, lease: Lease, item: Item) -> int:
        known = item.reported_mib if item.reported_mib is not None else self._by_driver.get(lease.lease_id, 0)
        return max(0, item.size_mib - known)

    def _set_claim(self, lease_id: str, claim: int) -> None:
        self.promised_mib += claim - self._claims.get(lease_id, 0)
        self._claims[lease_id] = claim

    def _hold_back(self, mark: int, mib: int) -> None:
        if mib > 0:
            self._held_back.append((mark, mib))
            self._held_back_mib += mib


def _size(lease: Lease, device: str) -> int:
    item = lease.on(device)
    return item.size_mib if item is not None else 0
