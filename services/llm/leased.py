"""The broker's leases as the residency uses them: how much to ask for, kept while a model lives on it, given back after."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec

from services.kit import telemetry
from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner
from services.llm.adapters.broker import HOST, Broker, DeniedError, Held
from services.llm.adapters.footprints import MIB, Footprints, allocated_mib
from services.llm.core.claims import Refusal, Want
from services.llm.core.embed_wire import EmbedConfig
from services.llm.core.memory import lease_mib, scratch_mib
from services.llm.leases import Claim, Ear, NoRoomError
from services.llm.served import Served

_log = telemetry.logger(__name__)
_KEY_CHARACTERS: Final = 32


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
        config = served.engine
        makes_vectors = isinstance(config, EmbedConfig)
        step_tokens = config.batch_tokens if isinstance(config, EmbedConfig) else config.ubatch_tokens
        share = 1.0
        if self._device_of(served) != HOST and config.gpu_layers is not None and config.layers > 0:
            share = min(1.0, config.gpu_layers / config.layers) if config.gpu_layers > 0 else 1.0
        return lease_mib(
            kept_mib=served.need_mib,
            scratch_mib=scratch_mib(served.file.header, step_tokens=step_tokens, has_logits=not makes_vectors),
            share=share,
            seen_mib=self._footprints.seen_mib(_profile(served)),
        )

    def want(self, served: Served, *, size_mib: int, rank: int, wait_s: float, reload_s: float | None) -> Want:
        """Return what to ask for."""
        return Want(
            served.entry.name,
            size_mib,
            self._device_of(served),
            rank,
            wait_s,
            reclaimable=not served.pinned,
            reload_s=reload_s,
            profile=_profile(served),
            file_mib=-(-(served.file.size + served.loras_bytes) // MIB),
        )

    def expect(self, served: Served) -> None:
        """Have a model's weights read ahead into the page cache."""
        if not isinstance(served.engine, EmbedConfig):
            self._cold.put_nowait((str(served.file.path), *served.engine.loras.values()))
        else:
            self._cold.put_nowait((str(served.file.path),))

    async def _warm(self) -> None:
        while True:
            await self._broker.warm(await self._cold.get())

    def _device_of(self, served: Served) -> str:
        if self._device:
            return self._device
        return HOST if served.engine.gpu_layers == 0 else ""

    @asynccontextmanager
    async def lease(self, want: Want, claim: Claim) -> AsyncIterator[None]:
        """Hold memory for the length of the block; see Leases."""
        await self._is_clear.wait()
        lease = await self._ask(want)
        if lease is None:
            yield
            return
        self._held[claim] = lease
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


def _profile(served: Served) -> str:
    """Return what tells one way of running a model from another."""
    said = msgspec.json.encode((served.engine, served.file.size, served.file.made_unix_s, served.loras_bytes))
    return hashlib.sha256(said).hexdigest()[:_KEY_CHARACTERS]
