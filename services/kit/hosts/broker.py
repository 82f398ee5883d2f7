"""Leases from vram: asked for, renewed and given back, whatever becomes of the broker meanwhile."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import grpc
import grpc.aio

from omniserve.admission.v1 import admission_pb2
from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from services.kit import telemetry
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.hosts.core.claims import REFUSALS, End, Refusal, Want, next_renewal_in
from services.kit.hosts.footprints import is_alive
from services.kit.owner import Owner

HOST: Final = "cpu"
"""The broker's name for the host's RAM."""
_AWAY: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
_MARGIN_S: Final = 5.0
_PAUSE_S: Final = 0.2
_GOODBYE_S: Final = 1.0
_TIERS: Final[Mapping[int, "admission_pb2.Tier.ValueType"]] = MappingProxyType(
    {
        0: admission_pb2.TIER_BACKGROUND,
        1: admission_pb2.TIER_FREE,
        2: admission_pb2.TIER_SUB,
        3: admission_pb2.TIER_PAID,
    }
)
_log = telemetry.logger(__name__)


class DeniedError(Exception):
    """The broker said no. `room_mib`: what there is for this tier; None when nobody knows."""

    def __init__(self, refusal: Refusal, message: str, room_mib: int | None) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.message = message
        self.room_mib = room_mib


@dataclass(slots=True, eq=False)
class Held:
    """A lease. `since_s`: when the last call that kept it was sent; `allocated_mib`: as the broker knows it."""

    lease_id: str
    device: str
    size_mib: int
    ttl_s: float
    since_s: float
    renewals: int = 0
    failures: int = 0
    allocated_mib: int = 0


class Broker:
    """What the broker is asked, as values. `patience_s`: how long one that does not answer is waited for by a load."""

    def __init__(
        self, channel: grpc.aio.Channel, clock: Clock, owner: Owner, *, tenant: str, pid: int, patience_s: float
    ) -> None:
        self._stub = vram_pb2_grpc.VramServiceStub(channel)
        self._clock = clock
        self._owner = owner
        self._tenant = tenant
        self._pid = pid
        self._patience_s = patience_s

    async def ask(self, want: Want) -> Held:
        """Lease memory. Raises DeniedError, and DomainError `no_capacity` when nobody answers.

        Who is cancelled meanwhile takes nothing: what the broker may grant all the same is given back.
        """
        asking = self._owner.start(self._asked(want), name=f"lease for {want.model}")
        try:
            outcome = await asyncio.shield(asking)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the service stops: the TTL ends what may have been granted
                self._owner.start(self._never_mind(asking), name=f"lease for {want.model}, not wanted any more")
            raise
        if isinstance(outcome, Held):
            return outcome
        raise outcome

    async def _asked(self, want: Want) -> Held | DeniedError | DomainError:
        """Return what was granted, or why nothing was: a task of the owner must not end by an exception."""
        request = self._request(want, pid=self._pid)
        ends_s = self._clock.monotonic() + self._patience_s
        while True:
            sent_s = self._clock.monotonic()
            try:
                return held(await self._stub.Lease(request, timeout=want.wait_s + _MARGIN_S), want, sent_s)
            except DeniedError as error:
                return error
            except grpc.aio.AioRpcError as error:
                if _is_missing_device(error):
                    return DeniedError(Refusal.OFF, error.details() or "", None)
                if error.code() not in _AWAY:
                    return from_rpc_error(error, unavailable=Reason.NO_CAPACITY)
                if self._clock.monotonic() >= ends_s:
                    message = f"the memory broker has not answered for {self._patience_s:g} s"
                    return DomainError(Reason.NO_CAPACITY, message, retry_after_ms=2_000)
            await asyncio.sleep(_PAUSE_S)

    def _request(self, want: Want, *, pid: int | None, allocated_mib: int = 0) -> pb.LeaseRequest:
        item = pb.LeaseItem(
            device=want.device or None,
            size_mib=want.size_mib,
            materialised_mib=min(want.size_mib, allocated_mib),
        )
        return pb.LeaseRequest(
            tenant=self._tenant,
            items=[item],
            tier=_TIERS[want.rank],
            pid=pid,
            purpose=want.model,
            reclaimable=want.reclaimable,
            reclaim=want.wait_s > 0,
            wait_ms=round(want.wait_s * 1000),
            reload_cost_s=want.reload_s,
            idempotency_key=uuid.uuid4().hex,
        )

    async def _never_mind(self, asking: "asyncio.Task[Held | DeniedError | DomainError]") -> None:
        outcome = await asking
        if isinstance(outcome, Held):
            await self.give_back(outcome, End.LOAD_FAILED, "")

    async def renew(self, lease: Held, want: Want, pid: int | None) -> None:
        """Renew a lease; one that the broker does not know any more is asked for anew. Raises DeniedError.

        A broker that does not answer counts as a failure in a row; the lease is in its file.
        """
        sent_s = self._clock.monotonic()
        try:
            answer = await self._stub.Renew(pb.RenewRequest(lease_id=lease.lease_id, pid=pid), timeout=_MARGIN_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                await self._regain(lease, want, pid)
                return
            lease.failures += 1
            _log.warning("a lease could not be renewed", model=want.model, why=error.details(), failures=lease.failures)
            return
        lease.since_s, lease.failures, lease.ttl_s = sent_s, 0, answer.lease.ttl_s
        lease.renewals += 1
        lease.allocated_mib = answer.lease.items[0].materialised_mib

    async def _regain(self, lease: Held, want: Want, pid: int | None) -> None:
        sent_s = self._clock.monotonic()
        request = self._request(want, pid=pid, allocated_mib=lease.allocated_mib)
        request.items[0].device = lease.device
        request.ClearField("wait_ms")
        try:
            new = held(await self._stub.Lease(request, timeout=_MARGIN_S), want, sent_s)
        except grpc.aio.AioRpcError as error:
            lease.failures += 1
            _log.warning("a lost lease could not be asked for anew", model=want.model, why=error.details())
            return
        lease.lease_id, lease.ttl_s, lease.since_s, lease.failures = new.lease_id, new.ttl_s, sent_s, 0
        _log.warning("a lease that the broker had lost was granted anew", model=want.model)

    def next_renewal_in(self, lease: Held) -> float:
        """Return the seconds until a lease is to be renewed."""
        return next_renewal_in(
            ttl_s=lease.ttl_s,
            since_s=lease.since_s,
            renewals=lease.renewals,
            failures=lease.failures,
            now_s=self._clock.monotonic(),
        )

    async def give_back(self, lease: Held, end: End, reclaim_id: str) -> None:
        """Give a lease back; when the broker does not answer, in the background, until its TTL ends it."""
        if await self._released(lease, end, reclaim_id):
            return
        with suppress(RuntimeError):  # the service stops: the TTL is all there is
            self._owner.start(self._insist(lease, end, reclaim_id), name="lease to be given back")

    async def _insist(self, lease: Held, end: End, reclaim_id: str) -> None:
        ends_s = self._clock.monotonic() + lease.ttl_s
        while self._clock.monotonic() < ends_s:
            await asyncio.sleep(_PAUSE_S)
            if await self._released(lease, end, reclaim_id):
                return

    async def _released(self, lease: Held, end: End, reclaim_id: str) -> bool:
        request = pb.ReleaseRequest(
            lease_id=lease.lease_id, reason=pb.LeaseEnd.ValueType(end.value), reclaim_id=reclaim_id or None
        )
        try:
            await self._stub.Release(request, timeout=_GOODBYE_S)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _AWAY
        except grpc.aio.UsageError:  # the channel is closed: the service stops, and the TTL is all there is
            pass
        return True

    async def used_mib(self, lease: Held, pid: int) -> int | None:
        """Return what the driver attributes to a process on a lease's device; None when nobody tells."""
        try:
            state = await self._stub.GetState(pb.GetStateRequest(devices=[lease.device]), timeout=_MARGIN_S)
        except grpc.aio.AioRpcError:
            return None
        return next((each.used_mib for device in state.devices for each in device.processes if each.pid == pid), None)

    async def clear_up(self) -> None:
        """End what a former process of this tenant has left behind: its hosts died with it."""
        with suppress(grpc.aio.AioRpcError):  # their TTL ends them
            state = await self._stub.GetState(pb.GetStateRequest(), timeout=_MARGIN_S)
            for lease in state.leases:
                if lease.tenant == self._tenant and lease.HasField("pid") and not is_alive(lease.pid):
                    request = pb.ReleaseRequest(lease_id=lease.lease_id, reason=pb.LEASE_END_CRASHED)
                    await self._stub.Release(request, timeout=_MARGIN_S)

    async def requests(self) -> AsyncIterator[tuple[str, str]]:
        """Give the lease and the request's id whenever memory is asked back, for ever."""
        while True:
            call: Any = self._stub.Watch(pb.WatchRequest(tenant=self._tenant))
            with suppress(grpc.aio.AioRpcError):
                async for event in call:
                    if event.HasField("reclaim_requested"):
                        yield event.reclaim_requested.lease_id, event.reclaim_requested.reclaim_id
                    elif event.HasField("snapshot"):
                        for lease in event.snapshot.leases:
                            if lease.tenant == self._tenant and lease.HasField("reclaim_id"):
                                yield lease.lease_id, lease.reclaim_id
            await asyncio.sleep(_PAUSE_S)

    async def warm(self, paths: Sequence[str]) -> None:
        """Name files that are soon read, so that they are in memory then; it is only a favour."""
        try:
            await self._stub.WarmFiles(pb.WarmFilesRequest(paths=paths), timeout=_MARGIN_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            _log.warning("weights are not read ahead", paths=list(paths), why=error.details())

    async def refuse(self, lease: Held, reclaim_id: str, *, pinned: bool) -> None:
        """Say that memory is not given back."""
        answer = pb.RECLAIM_ANSWER_PINNED if pinned else pb.RECLAIM_ANSWER_BUSY
        request = pb.RenewRequest(lease_id=lease.lease_id, reclaim_id=reclaim_id, reclaim_answer=answer)
        with suppress(grpc.aio.AioRpcError):  # it is not waited for much longer, then
            await self._stub.Renew(request, timeout=_MARGIN_S)


def held(response: pb.LeaseResponse, want: Want, sent_s: float) -> Held:
    """Return what was granted. Raises DeniedError."""
    if response.granted:
        item = response.items[0]
        return Held(response.lease_id, item.device, item.size_mib, response.ttl_s, sent_s)
    denied = response.denied
    refusal = REFUSALS.get(denied.reason, Refusal.LATER)
    room_mib = int(denied.headroom_mib) if denied.HasField("headroom_mib") else None
    raise DeniedError(refusal, f"{want.model!r} needs {want.size_mib} MiB: {denied.message}", room_mib)


def _is_missing_device(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.NOT_FOUND and (from_rpc_error(error).field or "").endswith("device")
