"""The broker's leases as the residency uses them: how much to ask for, kept while a model lives on it, given back after."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from services.kit import telemetry
from services.kit.errors import DomainError, Reason
from services.kit.hosts.broker import HOST, Broker, DeniedError, Held
from services.kit.hosts.core.claims import Refusal, Want
from services.kit.hosts.footprints import Footprints, allocated_mib
from services.kit.hosts.leases import Claim, Ear, NoRoomError
from services.kit.hosts.served import Served
from services.kit.owner import Owner

_log = telemetry.logger(__name__)


class BrokerLeases:
    """Leases from the broker. `device`: of all models; empty: the host's RAM for those without layers on a GPU.

    Otherwise the broker chooses, which on a machine without a GPU comes to the same.
    """

    def __init__(self, broker: Broker, footprints: Footprints, owner: Owner, *, device: str) -> None:
        self._broker = broker
        self._footprints = footprints
        self._owner = owner
        self._device = device
        self._held: dict[Claim, Held] = {}
        self._is_clear = asyncio.Event()
        self._cold: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()

    def size_mib(self, served: Served) -> int:
        """Return what a model takes: its files, its cache and what a step needs, or as much as it was seen to take."""
        seen_mib = self._footprints.seen_mib(served.profile)
        return served.lease_mib(seen_mib=seen_mib, on_host=self._device_of(served) == HOST)

    def want(self, served: Served, *, size_mib: int, rank: int, wait_s: float, reload_s: float | None) -> Want:
        """Return what to ask for."""
        return Want(
            served.name,
            size_mib,
            self._device_of(served),
            rank,
            wait_s,
            reclaimable=not served.pinned,
            reload_s=reload_s,
            profile=served.profile,
            file_mib=served.file_mib,
        )

    def expect(self, served: Served) -> None:
        """Have a model's weights read ahead into the page cache."""
        self._cold.put_nowait(served.files)

    async def _warm(self) -> None:
        while True:
            await self._broker.warm(await self._cold.get())

    def _device_of(self, served: Served) -> str:
        if self._device:
            return self._device
        return HOST if served.on_host else ""

    @asynccontextmanager
    async def lease(self, want: Want, claim: Claim) -> AsyncIterator[None]:
        """Hold memory for the length of the block; see Leases."""
        await self._is_clear.wait()
        lease = await self._ask(want)
        if lease is None:
            yield
            return
        self._held[claim] = lease
        claim.lease_id = lease.lease_id
        _log.info("memory charged", model=want.model, size_mib=lease.size_mib, device=lease.device)
        keeper = self._owner.start(self._keep(lease, want, claim), name=f"lease of {want.model}")
        try:
            yield
        finally:
            del self._held[claim]
            keeper.cancel()
            await asyncio.wait([keeper])
            await self._broker.give_back(lease, claim.end, claim.reclaim_id)
            _log.info("memory credited", model=want.model, size_mib=lease.size_mib, end=claim.end.name.lower())

    async def _ask(self, want: Want) -> Held | None:
        """Return a lease; None when the broker leases nothing of what is needed. Raises NoRoomError, DomainError."""
        try:
            return await self._broker.ask(want)
        except DeniedError as denied:
            if denied.refusal is Refusal.OFF:
                _log.info("memory that nobody leases", model=want.model, size_mib=want.size_mib, why=denied.message)
                return None
            if denied.refusal is Refusal.NEVER:
                raise DomainError(Reason.NO_CAPACITY, denied.message, retry_after_ms=60_000) from None
            room_mib = denied.room_mib if denied.refusal is Refusal.FULL else None
            raise NoRoomError(denied.message, room_mib) from None

    async def _keep(self, lease: Held, want: Want, claim: Claim) -> None:
        """Renew a lease, for ever. One that is lost and denied anew is asked for until who lives on it has left."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._broker.next_renewal_in(lease)):
                    await claim.news.wait()
            claim.news.clear()
            pid = claim.pid()
            try:
                await self._broker.renew(lease, want, pid)
                claim.lease_id = lease.lease_id  # another one when the broker had lost it
            except DeniedError as denied:
                lease.failures += 1
                claim.on_lost(denied.message)
            if pid is not None:
                await self._look(lease, want, pid)

    async def _look(self, lease: Held, want: Want, pid: int) -> None:
        """Learn how much a model takes."""
        if lease.device == HOST:
            allocated = await asyncio.to_thread(allocated_mib, pid)
            # Weights are mapped: their pages belong to no process, and computing goes through all of them.
            used = None if allocated is None else allocated + want.file_mib
        else:
            used = await self._broker.used_mib(lease, pid)
        if used is None:
            return
        try:
            if await asyncio.to_thread(self._footprints.note, want.profile, used):
                _log.info("memory seen", model=want.model, used_mib=used, leased_mib=lease.size_mib)
        except OSError as error:
            _log.warning("what models take cannot be kept", error=str(error))

    async def run(self, ear: Ear) -> None:
        """Hear what others need, for ever."""
        await self._broker.clear_up()
        self._is_clear.set()
        warming = self._owner.start(self._warm(), name="weights to be read ahead")
        try:
            async for lease_id, reclaim_id in self._broker.requests():
                found = [(claim, lease) for claim, lease in self._held.items() if lease.lease_id == lease_id]
                for claim, lease in found:
                    answer = ear(claim, reclaim_id)
                    if not answer.begun:
                        await self._broker.refuse(lease, reclaim_id, pinned=answer.pinned)
        finally:
            warming.cancel()
            await asyncio.wait([warming])
