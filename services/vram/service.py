"""The gRPC servicers: messages in, calls of the broker, answers and events out. They decide nothing."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc.aio
from typing_extensions import override

from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from services.kit import telemetry
from services.kit.access import caller_of
from services.kit.errors import DomainError, Reason
from services.vram import translate
from services.vram.adapters.driver import DriverError
from services.vram.adapters.host_memory import MIB, HostMemory
from services.vram.adapters.lease_file import FullError
from services.vram.adapters.names import name_of
from services.vram.broker import Broker
from services.vram.core import model
from services.vram.core.ledger import Ended
from services.vram.core.model import Denied, End, Refusal, RefusedError, Tier
from services.vram.core.reclaim import Answer, Reclaim
from services.vram.core.warming import MOST_FILES
from services.vram.settings import ReserveEntry
from services.vram.warmer import CHUNK_BYTES, UnfitPathError, Warmer
from services.vram.watchers import DeviceLook, Event, Gap, Watcher, Withdrawn

SERVICES: Final = ("omniserve.vram.v1.VramService", "omniserve.vram.v1.VramAdminService")
_LOOK_EVERY_S: Final = 1.0
_log = telemetry.logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class VramServicer(vram_pb2_grpc.VramServiceServicer):
    """omniserve.vram.v1.VramService."""

    def __init__(self, broker: Broker, reserves: Sequence[ReserveEntry], host: HostMemory, warmer: Warmer) -> None:
        self._broker = broker
        self._reserves = tuple(reserves)
        self._host = host
        self._warmer = warmer

    @override
    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        """See the contract."""
        _refuse_while_draining(self._broker)
        asked = translate.ask(request, self._broker.ledger.rules, tier=Tier[caller_of(context).tier.upper()])
        try:
            result = await self._broker.lease(asked, wait_s=request.wait_ms / 1000, reclaim=request.reclaim)
        except RefusedError as error:
            raise translate.refused(error) from error
        except FullError as error:
            raise DomainError(Reason.NO_CAPACITY, str(error)) from error
        if isinstance(result, Denied):
            return translate.refusal_answer(result, asked, self._broker.ledger)
        return translate.granted(result, self._broker.ledger)

    @override
    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """See the contract."""
        ledger = self._broker.ledger
        renewal = translate.renewal(request, ledger.rules)
        answer = _answer(request)
        try:
            lease = self._broker.renew(request.lease_id, renewal)
        except RefusedError as error:
            raise translate.refused(error) from error
        if answer is not None:
            self._broker.answer(request.reclaim_id, answer)
        devices = [item.device for item in lease.items]
        return pb.RenewResponse(
            lease=self._state_of(lease), headroom_mib=translate.headroom(ledger, lease.tier, devices)
        )

    @override
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """See the contract."""
        end = translate.end(request)
        if request.HasField("reclaim_id"):
            self._broker.answer(request.reclaim_id, Answer.FREED)
        return pb.ReleaseResponse(released=self._broker.release(request.lease_id, end))

    @override
    async def GetState(self, request: pb.GetStateRequest, context: Context) -> pb.GetStateResponse:
        """See the contract."""
        await self._broker.look()
        return self._state(request.devices)

    @override
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]
        """See the contract."""
        _refuse_while_draining(self._broker)
        if request.HasField("tenant") and not request.tenant:
            raise translate.invalid("tenant", "tenant is empty; leave it out to hear no reclaim requests")
        watcher = Watcher(request.tenant, request.events)
        await self._broker.look()
        self._broker.watchers.add(watcher)
        try:
            async with asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(self._look_at_devices(watcher)) if request.events else None
                async for event in watcher.read():
                    await context.write(self._told(event))
                if looking is not None:
                    looking.cancel()
        finally:
            self._broker.watchers.remove(watcher)

    @override
    async def GetHostMemory(self, request: pb.GetHostMemoryRequest, context: Context) -> pb.GetHostMemoryResponse:
        """See the contract."""
        try:
            total, available = await asyncio.to_thread(self._host.available)
        except DriverError as error:
            raise DomainError(Reason.UNSUPPORTED, f"this host does not tell its memory: {error}") from error
        await self._warmer.measure()
        return pb.GetHostMemoryResponse(
            total_mib=total // MIB,
            available_mib=available // MIB,
            keep_free_percent=self._warmer.keep_free_percent,
            enabled=self._warmer.enabled,
            chunk_mib=CHUNK_BYTES // MIB,
            files=map(translate.warm_file, self._warmer.files),
        )

    @override
    async def WarmFiles(self, request: pb.WarmFilesRequest, context: Context) -> pb.WarmFilesResponse:
        """See the contract."""
        if not 1 <= len(request.paths) <= MOST_FILES:
            message = f"paths are 1 to {MOST_FILES}, not {len(request.paths)}"
            raise translate.invalid("paths", message)
        try:
            checked = await asyncio.to_thread(self._warmer.check, list(request.paths))
            added = self._warmer.add(checked, caller_of(context).service)
        except UnfitPathError as error:
            reason = Reason.NOT_FOUND if error.is_missing else Reason.INVALID_REQUEST
            raise DomainError(reason, str(error), field=f"paths[{error.place}]") from None
        return pb.WarmFilesResponse(files=map(translate.warm_file, added))

    def _state(self, devices: Sequence[str] = ()) -> pb.GetStateResponse:
        broker, ledger, now = self._broker, self._broker.ledger, self._broker.now()
        wanted = [each for name, each in ledger.accounts.items() if not devices or name in devices]
        state = pb.GetStateResponse(
            devices=[translate.device_state(each, ledger.rules, now) for each in wanted],
            leases=[
                translate.lease_state(lease, ledger, now, broker.reclaims.of_lease(lease.lease_id))
                for lease in sorted(ledger.leases.values(), key=lambda each: each.granted_at)
                if not devices or any(item.device in devices for item in lease.items)
            ],
            reserves=[pb.Reserve(name=each.name, device=each.device, size_mib=each.mib) for each in self._reserves],
            denials=[translate.denial(refusal, now) for refusal in ledger.denials],
            counters=translate.counters(ledger),
            default_ttl_s=ledger.rules.default_ttl_s,
            max_ttl_s=ledger.rules.max_ttl_s,
            waiting=broker.waiting,
            enabled=ledger.rules.enabled,
        )
        if ledger.settles_at > now:
            state.settling_ms = translate.milliseconds(ledger.settles_at - now)
        for device in state.devices:
            for process in device.processes:
                process.name = name_of(process.pid)
        return state

    def _state_of(self, lease: model.Lease) -> pb.LeaseState:
        reclaim = self._broker.reclaims.of_lease(lease.lease_id)
        return translate.lease_state(lease, self._broker.ledger, self._broker.now(), reclaim)

    def _told(self, event: Event) -> pb.WatchResponse:
        ledger, now = self._broker.ledger, self._broker.now()
        told = pb.WatchResponse()
        match event:
            case Gap():
                told.snapshot.CopyFrom(self._state())
            case Reclaim():
                told.reclaim_requested.CopyFrom(translate.reclaim_requested(event, now))
            case Withdrawn():
                told.reclaim_withdrawn = event.reclaim.reclaim_id
            case model.Lease():
                told.lease_changed.lease.CopyFrom(self._state_of(event))
            case Ended():
                told.lease_ended.lease.CopyFrom(translate.lease_state(event.lease, ledger, now))
                told.lease_ended.reason = pb.LeaseEnd.ValueType(event.end)
            case Refusal():
                told.denial.CopyFrom(translate.denial(event, now))
            case DeviceLook():
                account = ledger.accounts[event.device]
                told.device_changed.CopyFrom(translate.device_state(account, ledger.rules, now))
        return told

    async def _look_at_devices(self, watcher: Watcher) -> None:
        """Tell a watcher about devices whose account has changed, once a second."""
        ledger = self._broker.ledger
        last: dict[str, pb.DeviceState] = {}
        while True:
            await self._broker.look()
            for name, account in ledger.accounts.items():
                state = translate.device_state(account, ledger.rules, self._broker.now())
                state.ClearField("age_ms")
                state.ClearField("driver_retry_ms")
                if name in last and last[name] != state:
                    watcher.put(DeviceLook(name))
                last[name] = state
            await asyncio.sleep(_LOOK_EVERY_S)


class VramAdminServicer(vram_pb2_grpc.VramAdminServiceServicer):
    """omniserve.vram.v1.VramAdminService."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @override
    async def RevokeLease(self, request: pb.RevokeLeaseRequest, context: Context) -> pb.RevokeLeaseResponse:
        """See the contract."""
        if not request.lease_id:
            raise translate.invalid("lease_id", "lease_id is required")
        revoked = self._broker.release(request.lease_id, End.REVOKED)
        if revoked:
            _log.warning("a lease was revoked", lease_id=request.lease_id, reason=request.reason)
        return pb.RevokeLeaseResponse(revoked=revoked)

    @override
    async def ReclaimMemory(self, request: pb.ReclaimMemoryRequest, context: Context) -> pb.ReclaimMemoryResponse:
        """See the contract."""
        ledger = self._broker.ledger
        if not 1 <= request.size_mib <= translate.MOST_MIB:
            raise translate.invalid("size_mib", f"size_mib is 1 to {translate.MOST_MIB}, not {request.size_mib}")
        if request.wait_ms > translate.MOST_WAIT_MS:
            raise translate.invalid("wait_ms", f"wait_ms is at most {translate.MOST_WAIT_MS}, not {request.wait_ms}")
        if request.device not in ledger.accounts:
            known = ", ".join(ledger.accounts)
            raise DomainError(Reason.NOT_FOUND, f"no device {request.device!r}; there are {known}", field="device")
        enough, asked = await self._broker.reclaim(request.device, request.size_mib, request.wait_ms / 1000)
        room = translate.headroom(ledger, Tier.BACKGROUND, [request.device]).get(request.device)
        return pb.ReclaimMemoryResponse(enough=enough, headroom_mib=room, asked=asked)


def _refuse_while_draining(broker: Broker) -> None:
    if broker.draining:
        raise DomainError(Reason.DRAINING, "vram is shutting down", retry_after_ms=1_000)


def _answer(request: pb.RenewRequest) -> Answer | None:
    """Return what a renewal says about a reclaim request; None when it is about none. Raises DomainError."""
    if not request.HasField("reclaim_id"):
        return None
    try:
        return Answer(request.reclaim_answer)
    except ValueError:
        raise translate.invalid("reclaim_answer", "reclaim_answer is required with reclaim_id") from None
