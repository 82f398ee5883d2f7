"""The engine's side of leases, over real gRPC to a broker in this process whose device the test sets."""

import asyncio
import os
from contextlib import asynccontextmanager

import pytest

from omniserve.vram.v1 import vram_pb2 as pb
from services.kit.channels import open_channel
from services.kit.clock import ManualClock, SystemClock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.broker import Broker
from services.kit.hosts.core.claims import End, Want
from services.kit.hosts.footprints import Footprints
from services.kit.hosts.leased import BrokerLeases
from services.kit.hosts.leases import Claim, NoRoomError, Yield
from services.kit.owner import Owner
from tests.fixtures.memory import Devices, running_broker

LIMIT_S = 60
DEAD = 2**22 + 1  # no process has this id


def want(size_mib: int, *, model: str = "m", device: str = "gpu0", wait_s: float = 0.0, **more: object) -> Want:
    given = {"reclaimable": True, "profile": model} | more
    return Want(model, size_mib, device, 1, wait_s, **given)  # type: ignore[arg-type]


class Tenant:
    """A service that lives on leases: what it hears, and how it answers."""

    def __init__(self, leases: BrokerLeases, footprints: Footprints) -> None:
        self.leases = leases
        self.footprints = footprints
        self.lost: list[str] = []
        self.asked: list[tuple[Claim, str]] = []
        self.answer = Yield(begun=False)

    def claim(self, pid: int | None = None) -> Claim:
        return Claim(lambda: pid, self.lost.append)

    def hear(self, claim: Claim, reclaim_id: str) -> Yield:
        self.asked.append((claim, reclaim_id))
        return self.answer


@asynccontextmanager
async def tenant(channel, folder, *, patience_s: float = 20.0, name: str = "llm"):
    async with Owner() as owner:
        broker = Broker(channel, SystemClock(), owner, tenant=name, pid=os.getpid(), patience_s=patience_s)
        footprints = Footprints(folder / "seen")
        found = Tenant(BrokerLeases(broker, footprints, owner, device=""), footprints)
        owner.start(found.leases.run(found.hear), name="ear")
        yield found


@pytest.fixture
async def broker(tmp_path):
    async with running_broker(tmp_path, Devices(free={"gpu0": 1000}, total=1000)) as running:
        yield running


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_memory_is_leased_for_the_block_and_given_back_with_the_reason(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm:
        claim = llm.claim()
        async with llm.leases.lease(want(600), claim):
            (lease,) = (await broker.state()).leases
            assert (lease.tenant, lease.purpose, lease.items[0].size_mib, lease.reclaimable) == ("llm", "m", 600, True)
            claim.end = End.EVICTED
        state = await broker.state()
        assert (list(state.leases), state.counters.ended_total) == ([], {"LEASE_END_EVICTED": 1})


async def test_a_refusal_tells_how_much_there_is_and_one_without_figures_drives_nobody_out(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm, llm.leases.lease(want(600), llm.claim()):
        with pytest.raises(NoRoomError) as full:
            await llm.leases.lease(want(600), llm.claim()).__aenter__()
        assert full.value.room_mib == 400
        assert "600 MiB are wanted" in full.value.message
        with pytest.raises(DomainError) as never:
            await llm.leases.lease(want(2000), llm.claim()).__aenter__()
        assert never.value.reason is Reason.NO_CAPACITY
        broker.devices.failure = "it fell off the bus"
        broker.clock.advance(100)
        with pytest.raises(NoRoomError) as unknown:
            await llm.leases.lease(want(100), llm.claim()).__aenter__()
        assert unknown.value.room_mib is None


async def test_what_the_broker_leases_nothing_of_is_had_without_a_lease(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm, llm.leases.lease(want(600, device="cpu"), llm.claim()):
        assert not (await broker.state()).leases


async def test_who_is_cancelled_while_it_asks_holds_nothing_afterwards(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm, tenant(broker.channel, tmp_path, name="other") as other:
        async with other.leases.lease(want(600), other.claim()):
            waiting = asyncio.ensure_future(llm.leases.lease(want(600, wait_s=30), llm.claim()).__aenter__())
            await until(lambda: _is(lambda state: state.waiting == 1, broker))
            waiting.cancel()
            await asyncio.wait([waiting])
        await until(lambda: _is(lambda state: state.waiting == 0 and not state.leases, broker))


async def _is(condition, broker) -> bool:
    return condition(await broker.state())


async def test_a_lease_that_the_broker_has_lost_is_asked_for_anew_and_the_model_stays(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm:
        claim = llm.claim(os.getpid())
        async with llm.leases.lease(want(600), claim):
            (lease,) = (await broker.state()).leases
            await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
            claim.news.set()
            await until(lambda: _is(lambda state: state.leases and state.leases[0].lease_id != lease.lease_id, broker))
            assert llm.lost == []
        assert not (await broker.state()).leases


async def test_a_lease_that_is_denied_anew_is_lost_and_asked_for_until_its_holder_has_left(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm, tenant(broker.channel, tmp_path, name="other") as other:
        claim = llm.claim()
        async with llm.leases.lease(want(600), claim):
            (lease,) = (await broker.state()).leases
            await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
            async with other.leases.lease(want(900), other.claim()):
                claim.news.set()
                await until(lambda: _true(llm.lost))
            await until(lambda: _is(lambda state: [each.tenant for each in state.leases] == ["llm"], broker))


async def _true(value: object) -> bool:
    return bool(value)


async def test_memory_is_asked_back_and_the_answer_reaches_who_waits(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm, tenant(broker.channel, tmp_path, name="other") as other:
        held = asyncio.Event()

        async def live() -> None:
            claim = llm.claim()
            async with llm.leases.lease(want(600), claim):
                held.set()
                await until(lambda: _true(len(llm.asked) > 1))
                claim.end, claim.reclaim_id = End.RECLAIMED, llm.asked[-1][1]

        living = asyncio.ensure_future(live())
        await held.wait()
        waiting = asyncio.ensure_future(other.leases.lease(want(900, wait_s=1), other.claim()).__aenter__())
        await until(lambda: _true(llm.asked))
        broker.clock.advance(1)
        with pytest.raises(NoRoomError, match="Waited 1 s"):
            await waiting  # it was asked, and was busy
        llm.answer = Yield(begun=True)
        async with other.leases.lease(want(900, wait_s=30), other.claim()):
            await living
        counters = (await broker.state()).counters
        assert counters.ended_total["LEASE_END_RECLAIMED"] == 1
        assert counters.reclaims_freed_total == 1


async def test_what_a_process_is_seen_to_take_is_what_the_next_load_leases(broker, tmp_path):
    async with tenant(broker.channel, tmp_path) as llm:
        claim = llm.claim(DEAD)
        async with llm.leases.lease(want(600, profile="p"), claim):
            broker.devices.used = {"gpu0": {DEAD: 710}}
            await broker.broker.refresh()
            claim.news.set()
            await until(lambda: _seen(llm.footprints, "p", claim))
        assert Footprints(tmp_path / "seen").seen_mib("p") == 710


async def _seen(footprints: Footprints, profile: str, claim: Claim) -> bool:
    claim.news.set()
    return footprints.seen_mib(profile) is not None


async def test_leases_of_a_former_process_are_ended_and_those_of_a_living_one_stay(broker, tmp_path):
    await broker.lease(300, "llm", pid=DEAD)
    await broker.lease(300, "llm", pid=os.getpid())
    await broker.lease(300, "another", pid=DEAD)
    async with tenant(broker.channel, tmp_path) as llm, llm.leases.lease(want(100), llm.claim()):
        left = sorted((each.tenant, each.pid) for each in (await broker.state()).leases)
        assert left == sorted([("another", DEAD), ("llm", os.getpid()), ("llm", os.getpid())])


async def test_a_broker_that_is_away_is_waited_for_and_the_lease_lives_on_in_its_file(tmp_path, free_ports):
    (port,) = free_ports(1)
    devices = Devices(free={"gpu0": 1000}, total=1000)
    clock = ManualClock()
    async with (
        Owner() as owner,
        open_channel(f"127.0.0.1:{port}", caller="llm", state_dir=tmp_path) as channel,
    ):
        broker = Broker(channel, SystemClock(), owner, tenant="llm", pid=os.getpid(), patience_s=60)
        asking = asyncio.ensure_future(broker.ask(want(600)))
        async with running_broker(tmp_path, devices, clock, port=port) as first:
            lease = await asking
            assert (await first.state()).leases[0].lease_id == lease.lease_id
        await broker.renew(lease, want(600), None)
        assert lease.failures == 1, "nobody answers, and nothing is lost by that"
        going = asyncio.ensure_future(broker.give_back(lease, End.IDLE, ""))
        async with running_broker(tmp_path, devices, clock, port=port) as second:
            await going
            await until(lambda: _is(lambda state: state.counters.ended_total == {"LEASE_END_IDLE": 1}, second))


async def test_a_broker_that_never_answers_is_a_refusal_with_a_reason(tmp_path, free_ports):
    async with (
        Owner() as owner,
        open_channel(f"127.0.0.1:{free_ports(1)[0]}", caller="llm", state_dir=tmp_path) as channel,
    ):
        broker = Broker(channel, SystemClock(), owner, tenant="llm", pid=os.getpid(), patience_s=0.2)
        with pytest.raises(DomainError) as refused:
            await broker.ask(want(600))
        assert refused.value.reason is Reason.NO_CAPACITY
        assert "the memory broker has not answered for 0.2 s" in refused.value.message
