"""The ledger of leases: who holds what, until when, and whether one more fits. Nothing here waits or looks at a clock.

Every call first ends the leases whose time is over: a TTL is looked at by calls and by no timer.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from services.vram.core.account import Account
from services.vram.core.model import (
    Ask,
    Denied,
    End,
    Facts,
    Failure,
    Item,
    KeyConflictError,
    Lease,
    Reading,
    Refusal,
    RefusedError,
    Renewal,
    Report,
    Rules,
    UnknownDeviceError,
    UnknownLeaseError,
    Wanted,
    Why,
)

KEPT_DENIALS: Final = 64


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that is over."""

    lease: Lease
    end: End


@dataclass(slots=True)
class Counts:
    """What happened since the ledger was made."""

    granted: int = 0
    renewed: int = 0
    denied: Counter[Why] = field(default_factory=Counter)
    ended: Counter[End] = field(default_factory=Counter)
    reclaims: int = 0
    reclaims_freed: int = 0


@dataclass(frozen=True, slots=True)
class Past:
    """What a former process left: its live leases, its counts, and until when nothing may be granted."""

    leases: tuple[Lease, ...] = ()
    counts: Counts = field(default_factory=Counts)
    settles_at: float = -math.inf


class Ledger:
    """The leases on all devices. `ended` gathers what is over until somebody takes it.

    `devices`: those that are there at least.
    """

    def __init__(self, devices: Mapping[str, Facts], rules: Rules, past: Past | None = None) -> None:
        past = Past() if past is None else past
        self.rules = rules
        self.accounts: dict[str, Account] = {}
        self.leases: dict[str, Lease] = {}
        self.counts = past.counts
        self.settles_at = past.settles_at
        self.denials: deque[Refusal] = deque(maxlen=KEPT_DENIALS)
        self.ended: list[Ended] = []
        self._by_key: dict[tuple[str, str], str] = {}
        self._ends: list[tuple[float, str]] = []
        self._mark = 0
        for lease in past.leases:
            self._keep(lease)
        self.know(devices)

    # ---- what the driver says -------------------------------------------------------------------------------------

    def mark(self) -> int:
        """Return the mark of everything so far; a reading that begins now carries it."""
        return self._mark

    def know(self, devices: Mapping[str, Facts]) -> None:
        """Take note of what devices there are; those known already stay."""
        for device, facts in devices.items():
            account = self.accounts.get(device)
            if account is not None:
                account.facts = facts
                continue
            account = self.accounts[device] = Account(facts)
            for lease in self.leases.values():
                account.restore(lease)

    def read(self, readings: Mapping[str, Reading | Failure]) -> None:
        """Take what the driver said about known devices."""
        for device, found in readings.items():
            account = self.accounts[device]
            if isinstance(found, Failure):
                account.fail(found)
            else:
                account.read(found)

    # ---- asks -----------------------------------------------------------------------------------------------------

    def arrive(self) -> int:
        """Return the mark of an ask that arrives now."""
        self._mark += 1
        return self._mark

    def lease(self, ask: Ask, lease_id: str, arrived: int, now: float, closed: Mapping[str, str]) -> Lease | Denied:
        """Grant all that is asked, or nothing. `closed`: devices whose room somebody better waits for, with a reason.

        The same ask under the same key answers with the lease that it got. A denial is not counted yet: who waits asks
        again. Raises UnknownDeviceError, KeyConflictError.
        """
        self.expire(now)
        if (known := self._known(ask)) is not None:
            return known
        if (closed_now := self._closed(now)) is not None:
            return closed_now
        chosen = self._choose(ask, closed)
        if isinstance(chosen, Denied):
            return chosen
        items: list[Item] = []
        for wanted in chosen:
            granted = self._fit(wanted, ask, arrived, now, closed)
            if isinstance(granted, Denied):
                return granted
            items.append(granted)
        lease = Lease(
            lease_id=lease_id,
            tenant=ask.tenant,
            items=tuple(items),
            tier=ask.tier,
            ttl_s=ask.ttl_s,
            granted_at=now,
            ends_at=now + ask.ttl_s,
            pid=ask.pid,
            reclaimable=ask.reclaimable,
            purpose=ask.purpose,
            key=ask.key,
            digest=ask.digest,
            reload_cost_s=ask.reload_cost_s,
        )
        self._keep(lease)
        for item in items:
            self.accounts[item.device].grant(lease, arrived)
        self.counts.granted += 1
        return lease

    def deny(self, ask: Ask, denied: Denied, now: float) -> Refusal:
        """Take note of a denial that is final."""
        refusal = Refusal(ask, denied, now)
        self.counts.denied[denied.why] += 1
        self.denials.appendleft(refusal)
        return refusal

    def short(self, ask: Ask) -> dict[str, int]:
        """Return how much is missing for an ask, by device; empty when it fits, or when nobody knows."""
        missing: dict[str, int] = {}
        for wanted in ask.items:
            devices = [wanted.device] if wanted.device else list(self.accounts)
            rooms = {name: self.accounts[name].room(ask.tier, self.rules) for name in devices if name in self.accounts}
            known = {name: room for name, room in rooms.items() if room is not None}
            if not known:
                continue
            best = max(known, key=lambda name: known[name])
            lacking = wanted.min_size_mib - wanted.materialised_mib - known[best]
            if lacking > 0:
                missing[best] = missing.get(best, 0) + lacking
        return missing

    def may_be_outdated(self, ask: Ask, arrived: int) -> bool:
        """Return whether a reading that begins now could answer an ask better than those that are there."""
        devices = [wanted.device for wanted in ask.items if wanted.device] or list(self.accounts)
        return any(not self.accounts[name].is_as_new_as(arrived) for name in devices if name in self.accounts)

    def _known(self, ask: Ask) -> Lease | None:
        lease_id = self._by_key.get((ask.tenant, ask.key)) if ask.key else None
        if lease_id is None:
            return None
        lease = self.leases[lease_id]
        if lease.digest != ask.digest:
            raise KeyConflictError(
                "idempotency_key",
                f"{ask.tenant} holds a lease under this idempotency_key that was asked for differently",
            )
        return lease

    def _closed(self, now: float) -> Denied | None:
        if not self.rules.enabled:
            return Denied(Why.DISABLED, "The memory broker is switched off (OMNISERVE_VRAM_BROKER=0).")
        if now < self.settles_at:
            left = self.settles_at - now
            message = (
                f"The stored leases could not be read; nothing is granted for another {left:.0f} s, "
                "when every old lease must have ended."
            )
            return Denied(Why.SETTLING, message, retry_after_s=left)
        return None

    def _choose(self, ask: Ask, closed: Mapping[str, str]) -> list[Wanted] | Denied:
        """Return the items with a device each: those that name none get the roomiest that no other item has."""
        taken: set[str] = set()
        for index, wanted in enumerate(ask.items):
            if not wanted.device:
                continue
            if wanted.device not in self.accounts:
                raise UnknownDeviceError(
                    f"items[{index}].device", f"no device {wanted.device!r}; there are {', '.join(self.accounts)}"
                )
            taken.add(wanted.device)
        chosen: list[Wanted] = []
        for wanted in ask.items:
            if wanted.device:
                chosen.append(wanted)
                continue
            free = [account for name, account in self.accounts.items() if name not in taken]
            if not free:
                message = f"{len(ask.items)} devices are wanted and there are {len(self.accounts)}."
                return Denied(Why.LARGER_THAN_DEVICE, message)
            best = max(free, key=lambda each: self._preference(each, ask, closed))
            taken.add(best.facts.device)
            chosen.append(replace(wanted, device=best.facts.device))
        return chosen

    def _preference(self, account: Account, ask: Ask, closed: Mapping[str, str]) -> tuple[bool, float]:
        room = account.room(ask.tier, self.rules)
        return account.facts.device not in closed, -math.inf if room is None else room

    def _fit(self, wanted: Wanted, ask: Ask, arrived: int, now: float, closed: Mapping[str, str]) -> Item | Denied:
        account = self.accounts[wanted.device]
        room = account.room(ask.tier, self.rules)
        if room is None or account.reading is None:
            return _unknown(account, now)
        if wanted.min_size_mib > account.reading.total_mib:
            message = (
                f"{wanted.min_size_mib} MiB are wanted on {wanted.device}, which has {account.reading.total_mib} MiB."
            )
            return Denied(Why.LARGER_THAN_DEVICE, message, wanted.device, room)
        # What the tenant has already is in the driver's figure, if the driver was asked since.
        has = wanted.materialised_mib if account.is_as_new_as(arrived) else 0
        size = min(wanted.size_mib, has + max(0, room))
        if size < wanted.min_size_mib or wanted.device in closed:
            return Denied(
                Why.NO_HEADROOM,
                closed.get(wanted.device) or _too_little(wanted, account, ask, room),
                wanted.device,
                room,
                self._earliest_end(account, now),
            )
        reported = min(wanted.materialised_mib, size) or None
        baseline = account.unaccounted_mib(ask.pid) if ask.pid and reported is None else 0
        return Item(wanted.device, size, reported, baseline)

    def _earliest_end(self, account: Account, now: float) -> float | None:
        ends = [lease.ends_at for lease in account.leases()]
        return max(0.0, min(ends) - now) if ends else None

    # ---- leases ---------------------------------------------------------------------------------------------------

    def renew(self, lease_id: str, renewal: Renewal, now: float) -> Lease:
        """Let the TTL start anew and take what is reported. Raises UnknownLeaseError, RefusedError.

        Never asks whether there is room: what was granted stays granted.
        """
        self.expire(now)
        lease = self.get(lease_id)
        items = list(lease.items)
        for index, report in enumerate(renewal.reports):
            place = next((i for i, item in enumerate(items) if item.device == report.device), None)
            if place is None:
                raise RefusedError(f"items[{index}].device", f"the lease holds nothing on {report.device!r}")
            items[place] = _reported(items[place], report, f"items[{index}]")
        pid = lease.pid if renewal.pid is None else renewal.pid
        if pid != lease.pid:
            items = [replace(item, baseline_mib=0) for item in items]
        ttl_s = lease.ttl_s if renewal.ttl_s is None else renewal.ttl_s
        renewed = replace(
            lease,
            items=tuple(items),
            ttl_s=ttl_s,
            ends_at=now + ttl_s,
            pid=pid,
            reclaimable=lease.reclaimable if renewal.reclaimable is None else renewal.reclaimable,
            renewals=lease.renewals + 1,
        )
        self.leases[lease_id] = renewed
        if renewed.ends_at < lease.ends_at:
            heapq.heappush(self._ends, (renewed.ends_at, lease_id))
        if renewed.items != lease.items or renewed.pid != lease.pid:
            self._mark += 1
        for item in items:
            if item.device in self.accounts:
                self.accounts[item.device].change(renewed, self._mark)
        self.counts.renewed += 1
        return renewed

    def release(self, lease_id: str, end: End, now: float) -> Lease | None:
        """End a lease; None when there is none such."""
        self.expire(now)
        return self._end(lease_id, end) if lease_id in self.leases else None

    def get(self, lease_id: str) -> Lease:
        """Return a live lease. Raises UnknownLeaseError."""
        lease = self.leases.get(lease_id)
        if lease is None:
            raise UnknownLeaseError("lease_id", "no such lease: it was released, it expired, or it never was")
        return lease

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            _, lease_id = heapq.heappop(self._ends)
            lease = self.leases.get(lease_id)
            if lease is None:
                continue
            if lease.ends_at > now:  # renewed meanwhile
                heapq.heappush(self._ends, (lease.ends_at, lease_id))
            else:
                self._end(lease_id, End.EXPIRED)

    def take_ended(self) -> list[Ended]:
        """Return what ended since this was called last."""
        taken, self.ended = self.ended, []
        return taken

    def _keep(self, lease: Lease) -> None:
        self.leases[lease.lease_id] = lease
        if lease.key:
            self._by_key[lease.tenant, lease.key] = lease.lease_id
        heapq.heappush(self._ends, (lease.ends_at, lease.lease_id))
        if len(self._ends) > 2 * len(self.leases) + 1_000:  # most of them of leases that were released
            self._ends = [(each.ends_at, each.lease_id) for each in self.leases.values()]
            heapq.heapify(self._ends)

    def _end(self, lease_id: str, end: End) -> Lease:
        lease = self.leases.pop(lease_id)
        if lease.key:
            self._by_key.pop((lease.tenant, lease.key), None)
        self._mark += 1
        for item in lease.items:
            account = self.accounts.get(item.device)
            if account is not None:
                account.remove(lease_id, self._mark)
        self.counts.ended[end] += 1
        self.ended.append(Ended(lease, end))
        return lease


def _reported(item: Item, report: Report, field: str) -> Item:
    size = item.size_mib if report.size_mib is None else report.size_mib
    if size > item.size_mib:
        message = f"a lease never grows: {size} MiB are asked for and {item.size_mib} MiB are leased on {item.device}"
        raise RefusedError(f"{field}.size_mib", message)
    known = item.reported_mib if report.materialised_mib is None else report.materialised_mib
    return replace(item, size_mib=size, reported_mib=None if known is None else min(known, size))


def _unknown(account: Account, now: float) -> Denied:
    failure = account.failure
    device = account.facts.device
    if failure is None:
        return Denied(Why.DRIVER_UNKNOWN, f"The driver has not said yet what is free on {device}.", device)
    message = f"The driver does not say what is free on {device}: {failure.message}"
    return Denied(Why.DRIVER_UNKNOWN, message, device, retry_after_s=max(0.0, failure.retry_at - now))


def _too_little(wanted: Wanted, account: Account, ask: Ask, room: int) -> str:
    free = account.reading.free_mib if account.reading is not None else 0
    least = wanted.min_size_mib
    has = f", {wanted.materialised_mib} MiB of them allocated already" if wanted.materialised_mib else ""
    return (
        f"{least} MiB are wanted on {wanted.device}{has}; the tier {ask.tier.name.lower()} has room for {room} MiB "
        f"({free} MiB free, {account.promised_mib} MiB promised)."
    )
