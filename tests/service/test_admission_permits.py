"""Admission on a real server with real clients: permits live as long as their streams, whatever ends them."""

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc
from services.kit.channels import open_channel
from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner
from services.kit.permits import PermitClient

ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count(1)


class Admission:
    """A real admission process on a free port, that can be killed and started again."""

    def __init__(self, state_dir: Path, port: int, **environ: str) -> None:
        self.state_dir = state_dir
        self.address = f"127.0.0.1:{port}"
        self.environ = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
            "OMNISERVE_STATE_DIR": str(state_dir),
            "OMNISERVE_ADMISSION_LISTEN": self.address,
            "OMNISERVE_ADMISSION_SLOTS": "4",
            **{f"OMNISERVE_ADMISSION_{name}": value for name, value in environ.items()},
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.admission", cwd=ROOT, env=self.environ, stderr=asyncio.subprocess.DEVNULL
        )
        async with self.channel("llm") as channel:
            await asyncio.wait_for(channel.channel_ready(), 100)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 100)

    def channel(self, caller: str) -> grpc.aio.Channel:
        return open_channel(self.address, caller=caller, state_dir=self.state_dir)

    async def status(self) -> pb.PoolStatus:
        async with self.channel("cli") as channel:
            stub = admission_pb2_grpc.AdmissionServiceStub(channel)
            answer = await stub.GetStatus(pb.GetStatusRequest(), timeout=60, wait_for_ready=True)
        return next(pool for pool in answer.pools if pool.name == "gpu0")

    async def hold(self, **fields: object) -> pb.HoldResponse:
        async with self.channel("cli") as channel:
            return await admission_pb2_grpc.AdmissionAdminServiceStub(channel).Hold(
                pb.HoldRequest(**fields), timeout=20
            )

    async def release_holds(self) -> pb.ReleaseHoldResponse:
        async with self.channel("cli") as channel:
            return await admission_pb2_grpc.AdmissionAdminServiceStub(channel).ReleaseHold(pb.ReleaseHoldRequest())


@asynccontextmanager
async def running(tmp_path: Path, free_ports: Callable[[int], list[int]], **environ: str) -> AsyncIterator[Admission]:
    admission = Admission(tmp_path, free_ports(1)[0], **environ)
    await admission.start()
    try:
        yield admission
    finally:
        await admission.stop()


@asynccontextmanager
async def client(admission: Admission) -> AsyncIterator[PermitClient]:
    session_id = f"s{next(_numbers)}"
    async with (
        admission.channel("llm") as channel,
        Owner() as owner,
        PermitClient(channel, service="llm", session_id=session_id, owner=owner, patience_s=60) as permits,
    ):
        yield permits


@pytest.fixture(scope="module")
def unspoilt(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]) -> Iterator[Admission]:
    admission = Admission(tmp_path_factory.mktemp("admission"), free_ports(1)[0])
    process = subprocess.Popen(
        [sys.executable, "-m", "services.admission"], cwd=ROOT, env=admission.environ, stderr=subprocess.DEVNULL
    )
    with grpc.insecure_channel(admission.address) as channel:
        grpc.channel_ready_future(channel).result(100)
        yield admission
    process.terminate()
    process.wait(100)


@pytest.fixture
async def admission(unspoilt: Admission) -> AsyncIterator[Admission]:
    """Return one that the tests share which neither stop it nor set anything."""
    yield unspoilt
    await until_free(unspoilt)


def llm(permits: PermitClient, tier: str = "free", **options: object):
    return permits.permit(modality="llm", tier=tier, principal="alice", request_id="r", **options)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(100):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"never: {what}")


async def until_free(admission: Admission) -> None:
    async with asyncio.timeout(100):
        while (now := await admission.status()).permits or now.in_use or now.waiting:
            await asyncio.sleep(0.02)


async def test_a_permit_lasts_as_long_as_its_block(admission):
    async with client(admission) as permits:
        async with llm(permits) as permit:
            assert permit.pool == "gpu0"
            assert (await admission.status()).in_use == 1
        await until_free(admission)


async def test_two_hundred_random_departures_leave_no_permit(admission):
    chance = random.Random(1)

    async with client(admission) as permits:

        async def come_and_go() -> None:
            try:
                async with asyncio.timeout(chance.uniform(0, 0.2)), llm(permits):
                    await asyncio.sleep(chance.uniform(0, 0.05))
            except TimeoutError:
                pass

        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(come_and_go())
        await until_free(admission)
        assert permits.held == 0


async def test_a_cancelled_waiter_never_takes_a_slot(admission):
    async with client(admission) as permits:
        places: asyncio.Queue[int] = asyncio.Queue()
        async with permits.permit(modality="image", tier="free", principal="alice", request_id="r"):

            async def wait_in_line() -> None:
                async with llm(permits, on_queued=lambda place, _: places.put_nowait(place)):
                    pytest.fail("granted although it was cancelled")

            waiter = asyncio.ensure_future(wait_in_line())
            assert await places.get() == 1
            waiter.cancel()
            await asyncio.wait([waiter])
        await until_free(admission)


async def test_who_may_not_wait_is_refused_at_once(admission):
    async with client(admission) as permits:
        async with permits.permit(modality="image", tier="free", principal="alice", request_id="r"):
            with pytest.raises(DomainError) as refused:
                async with llm(permits, may_wait=False):
                    pass
        assert refused.value.reason is Reason.SATURATED


async def test_a_wait_ends_at_its_deadline_with_the_numbers(admission):
    async with client(admission) as permits:
        async with permits.permit(modality="image", tier="free", principal="alice", request_id="r"):
            with pytest.raises(DomainError) as refused:
                async with llm(permits, wait_ms=50):
                    pass
        assert refused.value.reason is Reason.ADMISSION_TIMEOUT
        assert "4 of 4 slots" in refused.value.message


async def test_a_full_queue_refuses_at_once(tmp_path, free_ports):
    async with running(tmp_path, free_ports, MAX_QUEUE="0") as admission, client(admission) as permits:
        async with permits.permit(modality="image", tier="free", principal="alice", request_id="r"):
            with pytest.raises(DomainError) as refused:
                async with llm(permits):
                    pass
        assert refused.value.reason is Reason.QUEUE_FULL


async def test_running_work_survives_a_kill_of_admission_and_is_not_granted_twice(tmp_path, free_ports):
    async with running(tmp_path, free_ports) as admission, client(admission) as permits:
        async with AsyncExitStack() as held:
            for _ in range(4):
                await held.enter_async_context(llm(permits))
            await admission.kill()
            await eventually(lambda: not permits.connected, "the loss is noticed")
            waiting = asyncio.ensure_future(_take_and_leave(permits))
            await admission.start()
            await eventually(lambda: permits.connected, "the session is back")
            status = await admission.status()
            assert (status.permits, status.in_use) == (4, 4)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 100)
        await until_free(admission)


async def test_a_restart_refuses_nobody_who_waits(tmp_path, free_ports):
    async with running(tmp_path, free_ports) as admission, client(admission) as permits:
        async with AsyncExitStack() as held:
            for _ in range(4):
                await held.enter_async_context(llm(permits))
            places: asyncio.Queue[int] = asyncio.Queue()
            waiting = asyncio.ensure_future(_take_and_leave(permits, places))
            await places.get()
            await admission.stop()
            await admission.start()
            await eventually(lambda: permits.connected, "the session is back")
        await asyncio.wait_for(waiting, 100)


async def _take_and_leave(permits: PermitClient, places: "asyncio.Queue[int] | None" = None) -> None:
    async with llm(permits, on_queued=lambda place, _: places.put_nowait(place) if places else None):
        pass


ENGINE = """
import asyncio, sys
from pathlib import Path
from services.kit.channels import open_channel
from services.kit.owner import Owner
from services.kit.permits import PermitClient

async def main():
    address, state = sys.argv[1:]
    async with (
        open_channel(address, caller="llm", state_dir=Path(state)) as channel,
        Owner() as owner,
        PermitClient(channel, service="llm", session_id="engine", owner=owner) as permits,
        permits.permit(modality="image", tier="free", principal="alice", request_id="r"),
    ):
        print("holding", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def engine(admission: Admission) -> AsyncIterator[asyncio.subprocess.Process]:
    """An engine service in a process of its own that holds every slot."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENGINE, admission.address, str(admission.state_dir)),
        cwd=ROOT,
        env=admission.environ,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 100) == b"holding\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_the_slots_of_a_killed_engine_are_free_long_before_the_grace_is_over(tmp_path, free_ports):
    async with running(tmp_path, free_ports, SESSION_GRACE_S="600") as admission, engine(admission) as process:
        assert (await admission.status()).in_use == 4
        process.kill()
        await until_free(admission)


async def test_a_restart_does_not_wait_for_an_engine_that_was_killed_meanwhile(tmp_path, free_ports):
    async with running(tmp_path, free_ports, SETTLE_S="600") as admission:
        async with engine(admission) as process:
            await admission.kill()
            process.kill()
        await admission.start()
        async with client(admission) as permits, llm(permits, wait_ms=20_000):
            assert not (await admission.status()).holds


async def test_a_restart_waits_for_a_session_that_may_still_run(tmp_path, free_ports):
    async with running(tmp_path, free_ports, SETTLE_S="1.5") as admission:
        async with admission.channel("llm") as channel:
            ghost = admission_pb2_grpc.AdmissionServiceStub(channel).Session()
            await ghost.write(pb.SessionRequest(open=pb.SessionOpen(session_id="from another machine", service="llm")))
            await ghost.read()
            await admission.kill()
        await admission.start()
        places: asyncio.Queue[int] = asyncio.Queue()
        async with client(admission) as permits:
            [hold] = (await admission.status()).holds
            assert "1 sessions from before the restart" in hold.reason
            with pytest.raises(DomainError):
                async with llm(permits, may_wait=False):
                    pass
            await asyncio.wait_for(_take_and_leave(permits, places), 100)
            assert places.get_nowait() == 1


async def test_a_hold_outlives_a_restart_and_epochs_grow(tmp_path, free_ports):
    async with running(tmp_path, free_ports) as admission:
        await admission.hold(seconds=600, reason="hand-over", hold_id="mine", pool="gpu0")
        await admission.kill()
        await admission.start()
        [hold] = (await admission.status()).holds
        assert (hold.hold_id, hold.reason) == ("mine", "hand-over")
        async with admission.channel("cli") as channel:
            answer = await admission_pb2_grpc.AdmissionServiceStub(channel).GetStatus(pb.GetStatusRequest())
        assert answer.epoch == 2
        assert (await admission.release_holds()).released


async def test_nobody_to_ask_is_a_clear_refusal(tmp_path, free_ports):
    admission = Admission(tmp_path, free_ports(1)[0])
    async with (
        admission.channel("llm") as channel,
        Owner() as owner,
        PermitClient(channel, service="llm", session_id="s", owner=owner, patience_s=0.2) as permits,
    ):
        with pytest.raises(DomainError) as refused:
            async with llm(permits):
                pass
    assert refused.value.reason is Reason.ADMISSION_UNAVAILABLE


async def test_a_hold_drains_what_is_in_flight_and_stops_the_rest(admission):
    async with client(admission) as permits:
        async with llm(permits):
            answer = await admission.hold(seconds=60, reason="hand-over", wait_ms=50)
            assert (answer.drained, answer.in_flight) == (False, 1)
        assert (await admission.hold(seconds=60, reason="hand-over", wait_ms=10_000, hold_id=answer.hold_id)).drained
        with pytest.raises(DomainError):
            async with llm(permits, may_wait=False):
                pass
        assert (await admission.release_holds()).released
        async with llm(permits, may_wait=False):
            pass


async def test_a_background_holder_is_asked_to_leave_when_somebody_better_waits(admission):
    async with client(admission) as permits:
        async with permits.permit(modality="training", tier="paid", principal="a", request_id="r") as training:
            waiting = asyncio.ensure_future(_take_and_leave(permits))
            await asyncio.wait_for(training.yield_requested.wait(), 100)
        await asyncio.wait_for(waiting, 100)


async def test_a_single_caller_holds_its_permit_by_its_stream(admission):
    async with admission.channel("llm") as channel:
        stub = admission_pb2_grpc.AdmissionServiceStub(channel)
        call = stub.Acquire()
        await call.write(pb.AcquireRequest(ask=pb.Ask(modality=pb.MODALITY_IMAGE)))
        granted = (await call.read()).granted
        assert (granted.units, granted.pool, granted.tier) == (4, "gpu0", pb.TIER_FREE)
        second = stub.Acquire()
        await second.write(pb.AcquireRequest(ask=pb.Ask(modality=pb.MODALITY_LLM, tier=pb.TIER_PAID)))
        assert (await second.read()).queued.position == 1
        call.cancel()
        assert (await second.read()).granted.units == 1
        await second.done_writing()
        assert await second.read() is grpc.aio.EOF
        assert await second.code() is grpc.StatusCode.OK
        await until_free(admission)


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (pb.Ask(), "ask.modality"),
        (pb.Ask(modality=pb.MODALITY_LLM, units=99), "ask.units"),
        (pb.Ask(modality=pb.MODALITY_LLM, pool="gpu7"), "ask.pool"),
    ],
)
async def test_an_ask_that_can_never_be_served_names_its_field(admission, ask, field):
    async with admission.channel("llm") as channel:
        call = admission_pb2_grpc.AdmissionServiceStub(channel).Acquire()
        await call.write(pb.AcquireRequest(ask=ask))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field.split(".")[1] in (refused.value.details() or "") or "slots" in (refused.value.details() or "")


async def test_pressure_tells_who_waits_and_that_nobody_does(admission):
    async with (
        client(admission) as permits,
        admission.channel("llm") as channel,
    ):
        stub = admission_pb2_grpc.AdmissionServiceStub(channel)
        reports = stub.WatchPressure(pb.WatchPressureRequest(pools=["gpu0"], min_interval_ms=1))
        assert not (await reports.read()).pressures
        async with permits.permit(modality="image", tier="free", principal="alice", request_id="r"):
            waiting = asyncio.ensure_future(_take_and_leave(permits))
            async with asyncio.timeout(100):
                while not (report := await reports.read()).pressures:
                    pass
            assert [(one.tier, one.modality, one.depth) for one in report.pressures] == [
                (pb.TIER_FREE, pb.MODALITY_LLM, 1)
            ]
            assert report.free_slots == {"gpu0": 0}
        await waiting
        async with asyncio.timeout(100):
            while (await reports.read()).pressures:
                pass
        reports.cancel()
