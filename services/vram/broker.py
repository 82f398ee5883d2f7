"""The owner of the ledger: every call in turn on one event loop, readings when they are needed, and who waits or watches.

What a call changes is in the file of leases before the call is answered. Calls other than `lease` never wait.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from services.kit.clock import Clock
from services.kit.owner import Owner
from services.vram.adapters.driver import Driver
from services.vram.adapters.lease_file import FullError, LeaseFile
from services.vram.core.ledger import Ended, Ledger
from services.vram.core.line import Line, Waiting
from services.vram.core.model import Ask, Denied, End, Lease, RefusedError, Renewal, Tier, Why
from services.vram.core.reclaim import Answer, Reason, Reclaim, Reclaims, choose
from services.vram.watchers import Watchers

LOOKED_EVERY_S: Final = 0.1
"""How often the driver is asked while somebody waits for room: freed memory announces itself to nobody."""
RECLAIM_S: Final = 30.0
"""How long an answer to a reclaim request is of use, when nobody waits for a shorter time."""


@dataclass(frozen=True, slots=True)
class _Served:
    """What somebody got who waited. `is_new` is False when the lease was there already, under the same key."""

    lease: Lease
    is_new: bool


class Broker:
    """Owns the ledger. `owner` runs its readings; `new_id` returns what is hard to guess.

    `fresh_s`: how old figures may be when memory is granted. `trust_pids`: process ids mean the same here.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        file: LeaseFile,
        driver: Driver,
        *,
        owner: Owner,
        new_id: Callable[[], str],
        fresh_s: float,
        trust_pids: bool,
    ) -> None:
        self.ledger = ledger
        self.watchers = Watchers()
        self.reclaims = Reclaims()
        self.draining = False
        self._clock = clock
        self._file = file
        self._driver = driver
        self._owner = owner
        self._new_id = new_id
        self._fresh_s = fresh_s
        self._trust_pids = trust_pids
        self._line = Line()
        self._answers: dict[int, asyncio.Future[_Served]] = {}
        self._errands = itertools.count(-1, -1)
        self._reading: asyncio.Task[None] | None = None
        self._readings_begun = 0
        self._readings_done = 0

    def now(self) -> float:
        """Return the ledger's time, seconds."""
        return self._clock.monotonic()

    @property
    def waiting(self) -> int:
        """How many asks wait for room."""
        return len(self._line)

    # ---- calls ----------------------------------------------------------------------------------------------------

    async def lease(self, ask: Ask, *, wait_s: float, reclaim: bool) -> Lease | Denied:
        """Grant memory, or say why not; waits for room at most `wait_s`. A caller that is cancelled gets nothing.

        Raises UnknownDeviceError, KeyConflictError, FullError.
        """
        if not self._trust_pids:
            ask = structs.replace(ask, pid=0)
        arrived = self.ledger.arrive()
        result = await self._decide(ask, arrived)
        if isinstance(result, Denied) and (wait_s > 0 or reclaim) and _may_change(result):
            result = await self._wait(ask, arrived, result, wait_s=wait_s, reclaim=reclaim)
        if isinstance(result, Denied):
            self.watchers.denied(self.ledger.deny(ask, result, self.now()))
            self._file.count_denied(result.why, self.ledger.counts.denied[result.why])
        return result

    def renew(self, lease_id: str, renewal: Renewal) -> Lease:
        """Keep a lease alive. Raises UnknownLeaseError, RefusedError."""
        if not self._trust_pids:
            renewal = structs.replace(renewal, pid=None)
        before = self.ledger.leases.get(lease_id)
        try:
            lease = self.ledger.renew(lease_id, renewal, self.now())
        finally:
            self._settle()
        self._file.put(lease)
        if before is not None and (lease.items != before.items or lease.reclaimable != before.reclaimable):
            self.watchers.changed(lease)
            self._serve()
        return lease

    def release(self, lease_id: str, end: End) -> bool:
        """End a lease; False when there is none such."""
        released = self.ledger.release(lease_id, end, self.now()) is not None
        self._settle()
        self._serve()
        return released

    def answer(self, reclaim_id: str, answer: Answer) -> None:
        """Take a tenant's answer to a reclaim request; no effect when nobody is interested any more."""
        closed = self.reclaims.answer(reclaim_id, answer)
        if closed is not None and answer is Answer.FREED:
            self.ledger.counts.reclaims_freed += 1
            self._file.count(self.ledger.counts)

    async def look(self) -> None:
        """Bring everything up to date: the ends of leases, and what the driver says if that is old."""
        if self._is_old():
            await self.refresh()
        self.ledger.expire(self.now())
        self._settle()
        self._serve()

    async def reclaim(self, device: str, size_mib: int, wait_s: float) -> tuple[bool, int]:
        """Ask for room without leasing it; return whether it is there, and how many tenants were asked."""
        await self.refresh()
        errand, asked, ends = next(self._errands), 0, self.now() + wait_s
        need = _Need(errand, Tier.PAID, "", Reason.OPERATOR, ends if wait_s else self.now() + RECLAIM_S)
        try:
            while (missing := self._missing(device, size_mib)) > 0:
                asked += self._request(device, missing - self._expected(errand, device), need)
                if self.now() >= ends:
                    break
                await asyncio.sleep(min(LOOKED_EVERY_S, ends - self.now()))
                await self.refresh()
        finally:
            if wait_s:
                self._forget_waiter(errand)
        return missing <= 0, asked

    def drain(self) -> None:
        """End the watching, and let nobody wait any longer."""
        self.draining = True
        self.watchers.close()
        for ticket, answer in self._answers.items():
            self._line.leave(ticket)
            answer.cancel()

    # ---- readings -------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Return when the driver was asked after this call, or is not to be asked before its pause is over."""
        needed = self._readings_begun + 1
        while self._readings_done < needed and not self._driver.rests():
            if self._reading is None:
                self._readings_begun += 1
                self._reading = self._owner.start(self._read(), name="reading of the driver")
            await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            pids = {lease.pid for lease in self.ledger.leases.values() if lease.pid}
            found = await self._driver.read(self.ledger.mark(), pids)
            self.ledger.know(self._driver.devices)
            self.ledger.read(found)
        finally:
            self._reading = None
            self._readings_done = self._readings_begun

    def _is_old(self) -> bool:
        oldest = self.now() - self._fresh_s
        return any(each.reading is None or each.reading.at < oldest for each in self.ledger.accounts.values())

    # ---- deciding -------------------------------------------------------------------------------------------------

    async def _decide(self, ask: Ask, arrived: int) -> Lease | Denied:
        """Decide with the figures at hand where they are good enough, else with new ones."""
        if self._is_old():
            await self.refresh()
        elif self.ledger.may_be_outdated(ask, arrived):
            result = self._attempt(_whole(ask), arrived)
            if isinstance(result, Lease):
                return result
            await self.refresh()
        return self._attempt(ask, arrived)

    def _attempt(self, ask: Ask, arrived: int, closed: dict[str, str] | None = None) -> Lease | Denied:
        if closed is None:
            closed = self._line.closed_to(ask.tier, self.ledger.accounts)
        self._file.make_room()
        granted = self.ledger.counts.granted
        try:
            result = self.ledger.lease(ask, self._new_id(), arrived, self.now(), closed)
        finally:
            self._settle()
        if isinstance(result, Lease) and self.ledger.counts.granted != granted:
            self._file.put(result)
            self.watchers.changed(result)
        return result

    def _settle(self) -> None:
        """Store and tell what has ended, and the counts."""
        for ended in self.ledger.take_ended() if self.ledger.ended else ():
            self._file.remove(ended.lease.lease_id)
            self._file.count_ended(ended.end, self.ledger.counts.ended[ended.end])
            self._forget(ended)
        for late in self.reclaims.expire(self.now()) if self.reclaims.open else ():
            self.watchers.withdrawn(late)
        self._file.count(self.ledger.counts)

    def _forget(self, ended: Ended) -> None:
        for closed in self.reclaims.forget_lease(ended.lease.lease_id):
            self.watchers.withdrawn(closed)
        self.watchers.ended(ended)

    # ---- waiting --------------------------------------------------------------------------------------------------

    async def _wait(self, ask: Ask, arrived: int, denied: Denied, *, wait_s: float, reclaim: bool) -> Lease | Denied:
        if not wait_s:
            self._reclaim_for(ask, 0, self.now() + RECLAIM_S)
            return denied
        waiting = self._line.join(ask, arrived)
        answer: asyncio.Future[_Served] = asyncio.get_running_loop().create_future()
        self._answers[waiting.ticket] = answer
        ends = self.now() + wait_s
        try:
            while not answer.done() and self.now() < ends:
                if reclaim:
                    self._reclaim_for(ask, waiting.ticket, ends)
                await asyncio.wait([answer], timeout=min(LOOKED_EVERY_S, max(0.0, ends - self.now())))
                if not answer.done():
                    await self.refresh()
                    self._serve()
            if answer.done():
                return answer.result().lease
        except asyncio.CancelledError:
            self._take_back(answer)
            raise
        finally:
            self._line.leave(waiting.ticket)
            del self._answers[waiting.ticket]
            self._forget_waiter(waiting.ticket)
            self._serve()
        return replace(denied, why=Why.WAIT_OVER, message=f"{denied.message} Waited {wait_s:g} s for room.")

    def _serve(self) -> None:
        """Let those who wait have what they can get, in their order."""
        if not len(self._line):
            return

        def attempt(waiting: Waiting, closed: dict[str, str]) -> bool:
            granted, answer = self.ledger.counts.granted, self._answers[waiting.ticket]
            try:
                result = self._attempt(waiting.ask, waiting.arrived, closed)
            except (RefusedError, FullError) as error:
                answer.set_exception(error)
                return True
            if isinstance(result, Denied):
                return False
            answer.set_result(_Served(result, self.ledger.counts.granted != granted))
            return True

        self._line.serve(self.ledger.accounts, attempt)

    def _take_back(self, answer: "asyncio.Future[_Served]") -> None:
        """End the lease that was granted to somebody who has left meanwhile."""
        if answer.done() and not answer.cancelled() and answer.exception() is None and answer.result().is_new:
            self.release(answer.result().lease.lease_id, End.DONE)

    def _forget_waiter(self, ticket: int) -> None:
        for closed in self.reclaims.forget_waiter(ticket):
            self.watchers.withdrawn(closed)

    # ---- memory asked back ----------------------------------------------------------------------------------------

    def _reclaim_for(self, ask: Ask, ticket: int, until: float) -> None:
        need = _Need(ticket, ask.tier, ask.tenant, Reason.TENANT_WAITS, until)
        for device, mib in self.ledger.short(ask).items():
            self._request(device, mib - self._expected(ticket, device), need)

    def _expected(self, ticket: int, device: str) -> int:
        return self.reclaims.expected_mib(ticket).get(device, 0)

    def _request(self, device: str, mib: int, need: "_Need") -> int:
        """Ask tenants that watch for memory back; return how many were asked."""
        account = self.ledger.accounts[device]
        candidates = [
            (lease, held)
            for lease in account.leases()
            if self.watchers.has(lease.tenant) and (held := account.held(lease)) is not None
        ]
        spared = self.reclaims.spared(need.ticket)
        chosen = choose(candidates, mib, tier=need.tier, tenant=need.tenant, spared=spared)
        for one in chosen:
            reclaim = Reclaim(
                reclaim_id=self._new_id(),
                lease_id=one.lease.lease_id,
                tenant=one.lease.tenant,
                device=device,
                size_mib=one.size_mib,
                reason=need.reason,
                tier=need.tier,
                ticket=need.ticket,
                until=need.until,
            )
            self.reclaims.add(reclaim)
            self.ledger.counts.reclaims += 1
            self.watchers.requested(reclaim)
        return len(chosen)

    def _missing(self, device: str, size_mib: int) -> int:
        room = self.ledger.accounts[device].room(Tier.BACKGROUND, self.ledger.rules)
        return size_mib if room is None else size_mib - room


@dataclass(frozen=True, slots=True)
class _Need:
    """Who needs memory back. `ticket`: as in Reclaim."""

    ticket: int
    tier: Tier
    tenant: str
    reason: Reason
    until: float


def _may_change(denied: Denied) -> bool:
    return denied.why in {Why.NO_HEADROOM, Why.DRIVER_UNKNOWN, Why.SETTLING}


def _whole(ask: Ask) -> Ask:
    """Return the ask for all of it: less is granted only when it is certain that there is no more."""
    if all(each.min_size_mib == each.size_mib for each in ask.items):
        return ask
    whole = tuple(structs.replace(each, min_size_mib=each.size_mib) for each in ask.items)
    return structs.replace(ask, items=whole)
