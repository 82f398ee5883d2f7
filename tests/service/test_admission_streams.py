"""Admission's streams over real gRPC: what callers may do in any order, and what must never be left behind."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc
from services.admission.__main__ import build, registration
from services.admission.core.desk import Desk
from services.admission.service import SERVICES
from services.admission.settings import AdmissionSettings
from services.kit.channels import open_channel
from services.kit.clock import SystemClock
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.owner import Owner
from services.kit.permits import PermitClient
from services.kit.server import running_server

SLOTS = 4


@dataclass
class Admission:
    """A server in this process, on port 0."""

    address: str
    state_dir: Path
    stack: AsyncExitStack
    desk: Desk

    async def channel(self, caller: str = "llm") -> grpc.aio.Channel:
        return await self.stack.enter_async_context(open_channel(self.address, caller=caller, state_dir=self.state_dir))

    async def stub(self, caller: str = "llm") -> Any:
        return admission_pb2_grpc.AdmissionServiceStub(await self.channel(caller))

    async def pool(self) -> pb.PoolStatus:
        answer = await (await self.stub("cli")).GetStatus(pb.GetStatusRequest(), timeout=60)
        return next(pool for pool in answer.pools if pool.name == "gpu0")

    def lost(self) -> list[str]:
        return self.desk.absent()

    async def until_free(self) -> pb.PoolStatus:
        async with asyncio.timeout(30):
            while (now := await self.pool()).permits or now.in_use or now.waiting:
                await asyncio.sleep(0.02)
        return now

    @asynccontextmanager
    async def client(self, address: str | None = None) -> AsyncIterator[PermitClient]:
        async with (
            open_channel(address or self.address, caller="llm", state_dir=self.state_dir) as channel,
            Owner() as owner,
            PermitClient(channel, service="llm", session_id="s", owner=owner) as permits,
        ):
            yield permits


@asynccontextmanager
async def serving(tmp_path: Path, **knobs: Any) -> AsyncIterator[Admission]:
    settings = AdmissionSettings(state_dir=tmp_path, **{"slots": SLOTS, "drain_grace_s": 5.0, **knobs})
    keeper = build(settings, SystemClock())

    async def drain() -> None:
        keeper.drain()

    async with (
        Owner() as owner,
        running_server(
            name="admission",
            settings=settings,
            register=registration(keeper, settings),
            service_names=SERVICES,
            on_drain=drain,
        ) as port,
    ):
        owner.start(keeper.run(), name="timer")
        async with AsyncExitStack() as channels:
            yield Admission(f"127.0.0.1:{port}", tmp_path, channels, keeper.desk)


class Wire:
    """A TCP relay that can be cut."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self._host, _, self._port = target.partition(":")
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers |= {writer, back}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, back))
            group.create_task(self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def relay(target: str) -> AsyncIterator[Wire]:
    wire = Wire(target)
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    wire.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
        wire.cut()


def ask(modality: int = pb.MODALITY_LLM, **fields: Any) -> pb.Ask:
    return pb.Ask(modality=modality, **fields)


async def acquire(stub: Any, wanted: pb.Ask) -> Any:
    call = stub.Acquire()
    with contextlib.suppress(grpc.aio.AioRpcError):  # refused already: reading tells why
        await call.write(pb.AcquireRequest(ask=wanted))
    return call


async def session(stub: Any, session_id: str, *resume: pb.HeldPermit) -> Any:
    call = stub.Session()
    await call.write(pb.SessionRequest(open=pb.SessionOpen(session_id=session_id, service="llm", resume=resume)))
    return call


def session_ask(ask_id: int, wanted: pb.Ask) -> pb.SessionRequest:
    return pb.SessionRequest(ask=pb.SessionAsk(ask_id=ask_id, ask=wanted))


async def refusal(call: Any) -> DomainError:
    """Read to the end and return the error that the stream ends with."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream ended without a refusal")


async def next_event(call: Any, kind: str) -> Any:
    """Return the next event of a kind; news of places are passed over."""
    async with asyncio.timeout(30):
        while True:
            response = await call.read()
            assert response is not grpc.aio.EOF
            event = response.event if isinstance(response, pb.SessionResponse) else response
            if event.WhichOneof("event") == kind:
                return event


# ---- single callers ---------------------------------------------------------------------------------------------------


async def test_two_hundred_streams_cut_at_random_moments_leave_nothing(tmp_path):
    chance = random.Random(7)
    modalities = [pb.MODALITY_LLM, pb.MODALITY_LLM, pb.MODALITY_IMAGE, pb.MODALITY_TRAINING]
    async with serving(tmp_path) as admission:
        stub = await admission.stub()

        async def come_and_be_cut() -> None:
            call = stub.Acquire()
            wanted = ask(chance.choice(modalities), tier=chance.randint(1, 4), wait_ms=chance.choice([5, 60_000]))
            lifetime = chance.uniform(0, 2)  # long enough for a crowded machine to hear of most of them
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(lifetime):
                    await call.write(pb.AcquireRequest(ask=wanted))
                    if chance.random() < 0.2:
                        await call.write(pb.AcquireRequest(park=pb.Park()))
                    while await call.read() is not grpc.aio.EOF:
                        pass
            if chance.random() < 0.5:
                call.cancel()
            else:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                    await call.done_writing()

        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(come_and_be_cut())
        pool = await admission.until_free()
        assert pool.max_in_use <= SLOTS
        assert pool.max_waiting > 0


async def test_many_callers_of_all_tiers_never_exceed_the_slots_and_all_are_served(tmp_path):
    async with serving(tmp_path) as admission:
        stub = await admission.stub()
        inside = most = 0

        async def rounds(number: int) -> None:
            nonlocal inside, most
            for _ in range(5):
                call = await acquire(stub, ask(tier=1 + number % 4))
                await next_event(call, "granted")
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1
                call.cancel()

        async with asyncio.TaskGroup() as group:
            for number in range(64):
                group.create_task(rounds(number))
        pool = await admission.until_free()
        assert most <= SLOTS
        assert pool.max_in_use <= SLOTS
        assert sum(tier.granted_total for tier in pool.tiers) == 64 * 5


async def test_a_refusal_comes_as_an_event_and_as_the_status(tmp_path):
    async with serving(tmp_path) as admission:
        stub = await admission.stub()
        holder = await acquire(stub, ask(pb.MODALITY_IMAGE))
        await next_event(holder, "granted")
        call = await acquire(stub, ask(mode=pb.MODE_TRY))
        rejected = (await next_event(call, "rejected")).rejected
        assert rejected.reason == "saturated"
        assert "4 of 4 slots" in rejected.message
        error = await refusal(call)
        assert error.reason is Reason.SATURATED
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_who_has_waited_in_vain_is_told_when_to_come_back(tmp_path):
    async with serving(tmp_path, slots=1, max_queue=1) as admission:
        stub = await admission.stub()
        first = await acquire(stub, ask())
        await next_event(first, "granted")
        second = await acquire(stub, ask())
        await next_event(second, "queued")
        first.cancel()
        await next_event(second, "granted")
        late = await acquire(stub, ask(wait_ms=1_500))
        await next_event(late, "queued")
        full = await acquire(stub, ask())
        assert (await next_event(full, "rejected")).rejected.retry_after_ms > 0
        assert (await refusal(full)).reason is Reason.QUEUE_FULL
        assert (await next_event(late, "rejected")).rejected.retry_after_ms > 0
        error = await refusal(late)
        assert error.reason is Reason.ADMISSION_TIMEOUT
        assert (error.retry_after_ms or 0) > 0


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (pb.AcquireRequest(), "ask"),
        (pb.AcquireRequest(park=pb.Park()), "ask"),
        (pb.AcquireRequest(ask=pb.Ask()), "ask.modality"),
        (pb.AcquireRequest(ask=ask(units=5)), "ask.units"),
        (pb.AcquireRequest(ask=ask(pool="gpu7")), "ask.pool"),
    ],
)
async def test_what_can_never_be_served_names_its_field(tmp_path, first, field):
    async with serving(tmp_path) as admission:
        call = (await admission.stub()).Acquire()
        await call.write(first)
        error = await refusal(call)
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, field)


async def test_a_second_ask_on_one_stream_is_refused_and_gives_the_permit_back(tmp_path):
    async with serving(tmp_path) as admission:
        call = await acquire(await admission.stub(), ask())
        await next_event(call, "granted")
        await call.write(pb.AcquireRequest(ask=ask()))
        assert (await refusal(call)).field == "ask"
        await admission.until_free()


async def test_a_parked_caller_lets_others_through_and_keeps_its_place(tmp_path):
    async with serving(tmp_path, slots=1) as admission:
        stub = await admission.stub()
        holder = await acquire(stub, ask())
        await next_event(holder, "granted")
        cold = await acquire(stub, ask())
        await next_event(cold, "queued")
        warm = await acquire(stub, ask())
        await next_event(warm, "queued")
        await cold.write(pb.AcquireRequest(park=pb.Park()))
        await next_event(warm, "queued")  # told that it moved up
        holder.cancel()
        await next_event(warm, "granted")
        await cold.write(pb.AcquireRequest(ready=pb.Ready()))
        warm.cancel()
        await next_event(cold, "granted")


async def test_whoever_moves_up_is_told_so(tmp_path):
    async with serving(tmp_path, slots=1) as admission:
        stub = await admission.stub()
        calls = [await acquire(stub, ask()) for _ in range(4)]
        await next_event(calls[0], "granted")
        assert (await next_event(calls[3], "queued")).queued.position == 3
        calls[1].cancel()
        assert (await next_event(calls[3], "queued")).queued.position == 2


async def test_only_services_of_the_mesh_may_ask(tmp_path):
    async with serving(tmp_path) as admission:
        for caller in ("cli", "envoy-public", "envoy-operator"):
            call = await acquire(await admission.stub(caller), ask())
            assert (await refusal(call)).code is grpc.StatusCode.PERMISSION_DENIED


# ---- sessions ---------------------------------------------------------------------------------------------------------


async def test_a_session_that_is_open_is_not_opened_twice_and_does_not_suffer(tmp_path):
    async with serving(tmp_path) as admission:
        stub = await admission.stub()
        first = await session(stub, "s")
        await first.read()
        second = await session(stub, "s")
        error = await refusal(second)
        assert (error.reason, error.code) == (Reason.CONFLICT, grpc.StatusCode.ALREADY_EXISTS)
        await first.write(session_ask(1, ask()))
        assert (await next_event(first, "granted")).ask_id == 1
        await first.done_writing()
        await admission.until_free()


async def test_an_ask_that_can_never_be_served_does_not_end_the_session(tmp_path):
    async with serving(tmp_path) as admission:
        call = await session(await admission.stub(), "s")
        await call.write(session_ask(1, ask(units=99)))
        rejected = await next_event(call, "rejected")
        assert (rejected.ask_id, rejected.rejected.reason) == (1, "invalid_request")
        await call.write(session_ask(1, ask()))
        assert (await next_event(call, "granted")).ask_id == 1


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([pb.SessionRequest()], "open"),
        ([pb.SessionRequest(open=pb.SessionOpen())], "open"),
        ([session_ask(1, ask())], "open"),
        ([pb.SessionRequest(open=pb.SessionOpen(session_id="s"))] * 2, "open"),
        (
            [
                pb.SessionRequest(open=pb.SessionOpen(session_id="s")),
                session_ask(1, ask()),
                session_ask(1, ask()),
            ],
            "ask.ask_id",
        ),
    ],
)
async def test_a_session_that_breaks_the_contract_ends_and_names_the_field(tmp_path, messages, field):
    async with serving(tmp_path, session_grace_s=0.1) as admission:
        call = (await admission.stub()).Session()
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for message in messages:
                await call.write(message)
        error = await refusal(call)
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, field)
        await admission.until_free()


async def test_a_broken_stream_keeps_permits_and_places_for_the_session_that_returns(tmp_path):
    async with serving(tmp_path, session_grace_s=600) as admission:
        stub = await admission.stub()
        first = await session(stub, "s")
        await first.write(session_ask(1, ask(pb.MODALITY_IMAGE)))
        permit = (await next_event(first, "granted")).granted
        await first.write(session_ask(2, ask()))
        await next_event(first, "queued")
        first.cancel()
        async with asyncio.timeout(30):
            while "s" not in admission.lost():
                await asyncio.sleep(0.01)
        other = await acquire(stub, ask())
        await next_event(other, "queued")
        assert (await admission.pool()).in_use == SLOTS
        held = pb.HeldPermit(ask_id=1, permit_id=permit.permit_id, ask=ask(pb.MODALITY_IMAGE), units=permit.units)
        second = await session(stub, "s", held)
        assert (await second.read()).opened.epoch == 1
        await second.write(session_ask(2, ask()))
        await second.write(pb.SessionRequest(release=pb.SessionRelease(ask_id=1)))
        assert (await next_event(second, "granted")).ask_id == 2
        await next_event(other, "granted")
        assert (await admission.pool()).in_use == 2


async def test_a_session_that_does_not_return_loses_its_permits_after_the_grace(tmp_path):
    async with serving(tmp_path, session_grace_s=0.5) as admission:
        stub = await admission.stub()
        call = await session(stub, "s")
        await call.write(session_ask(1, ask(pb.MODALITY_IMAGE)))
        await next_event(call, "granted")
        waiter = await acquire(stub, ask())
        await next_event(waiter, "queued")
        call.cancel()
        async with asyncio.timeout(30):
            while "s" not in admission.lost():
                await asyncio.sleep(0.01)
        assert (await admission.pool()).in_use == SLOTS
        await next_event(waiter, "granted")
        assert admission.lost() == []


async def test_a_session_that_says_goodbye_is_forgotten_at_once(tmp_path):
    async with serving(tmp_path, session_grace_s=600) as admission:
        async with (
            admission.client() as permits,
            permits.permit(modality="llm", tier="free", principal="a", request_id="r"),
        ):
            assert json.loads((tmp_path / "admission.json").read_text())["sessions"]
        await admission.until_free()
        assert json.loads((tmp_path / "admission.json").read_text())["sessions"] == []


async def test_a_cold_model_loads_without_blocking_anybody_and_without_losing_its_place(tmp_path):
    names = {"modality": "llm", "tier": "free", "principal": "a", "request_id": "r"}
    async with serving(tmp_path, slots=1) as admission, admission.client() as permits, AsyncExitStack() as cold_block:
        async with permits.permit(**names):
            cold = await cold_block.enter_async_context(permits.ask(**names))
            assert await cold.park()
        async with permits.permit(**names) as loader:
            assert loader.units == 1
            places: asyncio.Queue[int] = asyncio.Queue()
            async with permits.ask(**names, on_queued=lambda place, _: places.put_nowait(place)) as behind:
                assert await asyncio.wait_for(places.get(), 30) == 1
                cold.ready()
                assert await asyncio.wait_for(places.get(), 30) == 2
        assert not behind.held
        assert (await asyncio.wait_for(cold.granted(), 30)).pool == "gpu0"


async def test_a_grant_that_crosses_a_park_stands(tmp_path):
    names = {"modality": "llm", "tier": "free", "principal": "a", "request_id": "r"}
    async with serving(tmp_path, slots=1) as admission, admission.client() as permits:
        async with permits.permit(**names):
            pass
        async with permits.ask(**names) as asking:
            assert not await asking.park()
            assert asking.held
        await admission.until_free()


async def test_a_parked_ask_outlives_a_broken_stream_and_is_not_granted_before_it_is_ready(tmp_path):
    names = {"modality": "llm", "tier": "free", "principal": "a", "request_id": "r"}
    async with (
        serving(tmp_path, slots=1) as admission,
        relay(admission.address) as wire,
        admission.client(address=wire.address) as permits,
    ):
        async with permits.permit(**names), permits.ask(**names) as cold:
            assert await cold.park()
            wire.cut()
            async with asyncio.timeout(30):
                while permits.connected:
                    await asyncio.sleep(0.01)
                while not permits.connected:
                    await asyncio.sleep(0.01)
            assert (await admission.pool()).permits == 1
            assert not cold.held
            assert cold.parked
            cold.ready()
            waiting = asyncio.ensure_future(cold.granted())
            async with asyncio.timeout(30):
                while (await admission.pool()).waiting != 1:
                    await asyncio.sleep(0.01)
            assert not waiting.done()
            waiting.cancel()
        await admission.until_free()


# ---- status, holds, drain ---------------------------------------------------------------------------------------------


async def test_status_tells_pools_tiers_holds_and_what_modalities_cost(tmp_path):
    async with serving(tmp_path) as admission:
        stub = await admission.stub("cli")
        holder = await acquire(await admission.stub(), ask(pb.MODALITY_IMAGE, tier=pb.TIER_PAID))
        await next_event(holder, "granted")
        waiter = await acquire(await admission.stub(), ask())
        await next_event(waiter, "queued")
        admin = admission_pb2_grpc.AdmissionAdminServiceStub(await admission.channel("cli"))
        held = await admin.Hold(pb.HoldRequest(seconds=60, reason="hand-over", modalities=[pb.MODALITY_TTS]))
        assert (held.drained, held.in_flight) == (True, 0)
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert (status.epoch, status.default_wait_ms, status.max_queue, status.draining) == (1, 120_000, 10_000, False)
        assert status.units_by_modality["MODALITY_IMAGE"] == SLOTS
        pool = await admission.pool()
        assert (pool.slots, pool.in_use, pool.permits, pool.waiting) == (SLOTS, SLOTS, 1, 1)
        assert [tier.tier for tier in pool.tiers] == [pb.TIER_PAID, pb.TIER_SUB, pb.TIER_FREE, pb.TIER_BACKGROUND]
        assert [tier.granted_total for tier in pool.tiers] == [1, 0, 0, 0]
        assert [tier.waiting for tier in pool.tiers] == [0, 0, 1, 0]
        [hold] = pool.holds
        assert (hold.reason, list(hold.modalities)) == ("hand-over", [pb.MODALITY_TTS])


async def test_a_hold_waits_for_all_but_its_own_permit_and_ends_with_what_it_waits_for(tmp_path):
    async with serving(tmp_path) as admission:
        admin = admission_pb2_grpc.AdmissionAdminServiceStub(await admission.channel("cli"))
        stub = await admission.stub()
        own = await acquire(stub, ask())
        permit = (await next_event(own, "granted")).granted.permit_id
        other = await acquire(stub, ask())
        await next_event(other, "granted")
        waiting = asyncio.ensure_future(
            admin.Hold(pb.HoldRequest(seconds=60, wait_ms=60_000, exclude_permits=[permit])),
        )
        async with asyncio.timeout(30):
            while not (await admission.pool()).holds:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        other.cancel()
        answer = await asyncio.wait_for(waiting, 30)
        assert (answer.drained, answer.in_flight) == (True, 0)


async def test_a_hold_that_is_released_is_not_waited_for_any_more(tmp_path):
    async with serving(tmp_path) as admission:
        admin = admission_pb2_grpc.AdmissionAdminServiceStub(await admission.channel("cli"))
        holder = await acquire(await admission.stub(), ask())
        await next_event(holder, "granted")
        waiting = asyncio.ensure_future(admin.Hold(pb.HoldRequest(seconds=60, wait_ms=60_000)))
        async with asyncio.timeout(30):
            while not (await admission.pool()).holds:
                await asyncio.sleep(0.01)
        assert (await admin.ReleaseHold(pb.ReleaseHoldRequest())).released
        answer = await asyncio.wait_for(waiting, 30)
        assert (answer.drained, answer.in_flight) == (False, 1)
        assert not (await admin.ReleaseHold(pb.ReleaseHoldRequest(hold_id="unknown"))).released


async def test_while_it_drains_waiters_are_refused_and_holders_may_finish(tmp_path):
    async with AsyncExitStack() as outside:
        async with serving(tmp_path) as admission:
            channel = open_channel(admission.address, caller="llm", state_dir=tmp_path)
            stub = admission_pb2_grpc.AdmissionServiceStub(await outside.enter_async_context(channel))
            holder = await acquire(stub, ask(pb.MODALITY_IMAGE))
            await next_event(holder, "granted")
            waiter = await acquire(stub, ask())
            await next_event(waiter, "queued")

            async def finish() -> None:
                assert (await next_event(waiter, "rejected")).rejected.reason == "draining"
                assert (await refusal(waiter)).code is grpc.StatusCode.UNAVAILABLE
                await holder.done_writing()
                assert await holder.code() is grpc.StatusCode.OK

            finishing = asyncio.ensure_future(finish())
        await asyncio.wait_for(finishing, 30)


async def test_pressure_refuses_an_unknown_pool(tmp_path):
    async with serving(tmp_path) as admission:
        call = (await admission.stub()).WatchPressure(pb.WatchPressureRequest(pools=["gpu7"]))
        error = await refusal(call)
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "pools")
