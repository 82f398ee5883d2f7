"""Both clients against a real broker: kept, released, lost, and across a restart."""

import asyncio
import threading

import pytest

from omniserve.vram.v1 import vram_pb2 as pb
from omniserve_client import AsyncLeaseClient, LeaseClient, LeaseDeniedError, LeaseLostError
from services.kit.tokens import ensure_token
from tests.fixtures.memory import Devices, running_broker

LIMIT_S = 60


@pytest.fixture
async def broker(tmp_path):
    async with running_broker(tmp_path, Devices(free={"gpu0": 10_000, "gpu1": 5000})) as running:
        yield running


def arguments(broker, tmp_path):
    token = ensure_token(tmp_path, "cli")
    return {"target": f"127.0.0.1:{broker.port}", "tenant": "trainer", "service_token": token}


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def only_lease(broker):
    (lease,) = (await broker.state()).leases
    return lease


async def test_a_lease_is_held_for_the_length_of_the_block(broker, tmp_path):
    async with AsyncLeaseClient(**arguments(broker, tmp_path)) as client:
        async with client.lease(6000, purpose="tuning", tier="background", ttl_s=60) as lease:
            assert (lease.mib, lease.device, lease.sizes) == (6000, "gpu0", {"gpu0": 6000})
            seen = await only_lease(broker)
            assert (seen.lease_id, seen.tenant, seen.purpose, seen.ttl_s) == (lease.lease_id, "trainer", "tuning", 60)
            lease.report(4000)
            await until(lambda: broker.broker.ledger.get(lease.lease_id).items[0].reported_mib == 4000)
        assert not (await broker.state()).leases


async def test_an_exception_or_a_cancellation_gives_it_back(broker, tmp_path):
    async with AsyncLeaseClient(**arguments(broker, tmp_path)) as client:

        async def fail():
            async with client.lease({"gpu0": 1, "gpu1": 2}) as lease:
                assert lease.mib == 3
                raise RuntimeError("the load failed")

        with pytest.raises(RuntimeError):
            await fail()
        assert not (await broker.state()).leases

        entered = asyncio.Event()

        async def linger():
            async with client.lease(1):
                entered.set()
                await asyncio.sleep(3600)

        lingering = asyncio.ensure_future(linger())
        await entered.wait()
        lingering.cancel()
        await asyncio.wait([lingering])
        assert not (await broker.state()).leases


async def test_a_denial_tells_the_numbers(broker, tmp_path):
    async with AsyncLeaseClient(**arguments(broker, tmp_path)) as client:
        with pytest.raises(LeaseDeniedError, match="10001 MiB") as denied:
            async with client.lease(10_001, device="gpu0"):
                pass
        assert denied.value.reason == "larger_than_device"
        async with client.lease(9000, device="gpu0"), client.lease(5000, min_mib=500, device="gpu0") as small:
            assert small.mib == 1000


async def test_a_lease_that_the_broker_forgot_is_asked_for_anew(broker, tmp_path):
    async with (
        AsyncLeaseClient(**arguments(broker, tmp_path)) as client,
        client.lease(6000, device="gpu0") as lease,
    ):
        first = lease.lease_id
        await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=first))
        lease.report(100)
        await until(lambda: lease.lease_id != first)
        assert not lease.is_lost
        seen = await only_lease(broker)
        assert (seen.lease_id, seen.items[0].size_mib, seen.items[0].materialised_mib) == (lease.lease_id, 6000, 100)


async def test_a_lease_whose_room_went_to_another_is_lost_and_says_so(broker, tmp_path):
    told = []
    async with (
        AsyncLeaseClient(**arguments(broker, tmp_path)) as client,
        client.lease(6000, device="gpu0", on_lost=told.append) as lease,
    ):
        await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
        await broker.lease(9000, "other")
        lease.check()
        lease.report(100)
        async with asyncio.timeout(LIMIT_S):
            await lease.wait_lost()
        with pytest.raises(LeaseLostError, match="denied another"):
            lease.check()
        await until(lambda: told == [lease])


async def test_the_blocking_client_does_all_that_in_threads(broker, tmp_path):
    told = threading.Event()

    def work():
        with LeaseClient(**arguments(broker, tmp_path)) as client:
            with pytest.raises(LeaseDeniedError):
                client.lease(99_999)
            with client.lease(6000, device="gpu0", on_lost=lambda _: told.set()) as lease:
                assert (lease.mib, lease.sizes) == (6000, {"gpu0": 6000})
                lease.report(50, pid=77)
                revoked.set_result_threadsafe(lease.lease_id)
                hogged.wait(LIMIT_S)
                lease.report(60)
                assert lease.wait_lost(LIMIT_S)
                assert lease.is_lost
                with pytest.raises(LeaseLostError):
                    lease.check()
            with client.lease(1, device="gpu1", wait_s=1) as lease:
                lease.check()
                lease.release()

    revoked, hogged = _Crossing(), threading.Event()
    working = asyncio.ensure_future(asyncio.to_thread(work))
    lease_id = await revoked.result()
    await until(lambda: broker.broker.ledger.get(lease_id).pid == 77)
    await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease_id))
    await broker.lease(9000, "other")
    hogged.set()
    await working
    assert told.is_set()
    assert [each.tenant for each in (await broker.state()).leases] == ["other"]


class _Crossing:
    """A result that a thread hands to the event loop."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()

    def set_result_threadsafe(self, value):
        self._loop.call_soon_threadsafe(self._future.set_result, value)

    async def result(self):
        async with asyncio.timeout(LIMIT_S):
            return await self._future


async def test_a_lease_survives_a_restart_of_the_broker(tmp_path, free_ports):
    (port,) = free_ports(1)
    async with running_broker(tmp_path, port=port) as broker:
        client = AsyncLeaseClient(**arguments(broker, tmp_path))
        holding = client.lease(6000, ttl_s=600)
        lease = await holding.__aenter__()
        clock = broker.clock
    lease.report(10)  # nobody answers now
    async with running_broker(tmp_path, clock=clock, port=port) as broker:
        await until(lambda: broker.broker.ledger.get(lease.lease_id).items[0].reported_mib == 10)
        assert not lease.is_lost
        await holding.__aexit__(None, None, None)
        assert not (await broker.state()).leases
        async with client:
            pass


async def test_who_asks_while_the_broker_is_away_waits_for_it_and_leases_once(tmp_path, free_ports):
    (port,) = free_ports(1)
    ensure_token(tmp_path, "cli")
    async with AsyncLeaseClient(
        f"127.0.0.1:{port}", tenant="t", service_token=ensure_token(tmp_path, "cli"), patience_s=LIMIT_S
    ) as client:

        async def ask():
            async with client.lease(100) as lease:
                return lease.mib

        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(0)
        async with running_broker(tmp_path, port=port) as broker:
            assert await asking == 100
            assert (await broker.state()).counters.granted_total == 1


async def test_memory_that_is_asked_back_is_refused_shrunk_or_given_up(broker, tmp_path):
    answers: list[int | None] = [None, 3000, 0]
    asked: list[tuple[str, int]] = []
    over = asyncio.Event()

    async def give(_lease, device, mib):
        asked.append((device, mib))
        keeps_mib = answers.pop(0)
        if keeps_mib == 0:
            over.set()
        return keeps_mib

    async with AsyncLeaseClient(**arguments(broker, tmp_path)) as client:
        async with client.lease(9000, device="gpu0", tier="background", on_reclaim=give) as lease:
            await until(lambda: broker.broker.watchers.has("trainer"))
            refused = asyncio.ensure_future(broker.lease(2000, "other", reclaim=True, wait_ms=1000))
            await until(lambda: asked and broker.broker.reclaims.open == {})
            broker.clock.advance(1)
            assert not (await refused).granted, "it was not now"
            assert (await broker.lease(5000, "other", reclaim=True, wait_ms=60_000)).granted
            assert lease.mib == 3000
            waiting = asyncio.ensure_future(broker.lease(4000, "third", reclaim=True, wait_ms=60_000))
            await over.wait()
        assert (await waiting).granted
    assert asked == [("gpu0", 1000), ("gpu0", 4000), ("gpu0", 2000)]
    assert (await broker.state()).counters.reclaims_freed_total == 2


async def test_a_thread_gives_memory_back_when_it_is_asked_to(broker, tmp_path):
    given = threading.Event()

    def give(_lease, device, mib):
        assert (device, mib) == ("gpu0", 3000)
        given.set()
        return 0

    def train():
        with (
            LeaseClient(**arguments(broker, tmp_path)) as client,
            client.lease(9000, device="gpu0", tier="background", on_reclaim=give) as lease,
        ):
            assert given.wait(LIMIT_S)
            assert not lease.is_lost

    training = asyncio.ensure_future(asyncio.to_thread(train))
    await until(lambda: broker.broker.watchers.has("trainer"))
    assert (await broker.lease(4000, "other", reclaim=True, wait_ms=60_000)).granted
    await training
    assert (await broker.state()).counters.reclaims_freed_total == 1
