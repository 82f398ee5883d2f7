"""vram over real gRPC: what is granted, waited for, asked back, watched and refused."""

import asyncio
import os
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from omniserve.admission.v1 import admission_pb2
from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from services.kit.channels import open_channel
from services.kit.errors import Reason, from_rpc_error
from tests.fixtures.memory import Devices, running_broker

LIMIT_S = 60
# `make chaos` races 10,000 times over gRPC; tests/unit/vram/test_ledger.py always does, on the ledger itself.
RACES = int(os.environ.get("RACES", "500"))


@pytest.fixture
async def broker(tmp_path):
    async with running_broker(tmp_path) as running:
        yield running


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return from_rpc_error(failure.value)


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


# ---- leases ------------------------------------------------------------------------------------------------------


async def test_a_lease_is_granted_renewed_and_released(broker):
    granted = await broker.lease(6000, purpose="a model", pid=77)
    assert granted.granted
    assert [(item.device, item.size_mib) for item in granted.items] == [("gpu0", 6000)]
    assert granted.ttl_s == 120
    assert granted.headroom_mib == {"gpu0": 4000}
    report = pb.RenewItem(device="gpu0", materialised_mib=5000)
    renewed = await broker.stub.Renew(pb.RenewRequest(lease_id=granted.lease_id, items=[report]))
    assert renewed.lease.items[0].materialised_mib == 5000
    assert renewed.lease.items[0].source == pb.MATERIALISED_SOURCE_TENANT
    assert (renewed.lease.tenant, renewed.lease.purpose, renewed.lease.renewals) == ("t", "a model", 1)
    assert (await broker.stub.Release(pb.ReleaseRequest(lease_id=granted.lease_id))).released
    assert not (await broker.stub.Release(pb.ReleaseRequest(lease_id=granted.lease_id))).released
    assert (await broker.lease(10_000)).granted, "what was given back is free at once"


async def test_a_denial_is_an_answer_with_the_numbers(broker):
    first = await broker.lease(6000)
    broker.clock.advance(20)
    denied = await broker.lease(5000, "u", purpose="too much")
    assert not denied.granted
    assert denied.lease_id == ""
    assert denied.denied.reason == pb.DENIAL_REASON_NO_HEADROOM
    assert (denied.denied.device, denied.denied.headroom_mib, denied.denied.retry_after_ms) == ("gpu0", 4000, 100_000)
    assert "5000 MiB are wanted on gpu0" in denied.denied.message
    broker.clock.advance(5)
    state = await broker.state()
    assert [(each.tenant, each.purpose, each.age_ms) for each in state.denials] == [("u", "too much", 5000)]
    assert state.counters.denied_total == {"DENIAL_REASON_NO_HEADROOM": 1}
    assert [each.lease_id for each in state.leases] == [first.lease_id]


async def test_a_dead_tenants_room_is_back_after_the_ttl_and_at_the_first_call(broker):
    await broker.lease(6000, ttl_s=30)
    broker.clock.advance(29.9)
    assert not (await broker.lease(5000)).granted
    broker.clock.advance(0.1)
    assert (await broker.lease(5000)).granted
    state = await broker.state()
    assert state.counters.ended_total == {"LEASE_END_EXPIRED": 1}


async def test_the_dead_tenants_memory_is_still_taken_as_long_as_the_driver_says_so(broker):
    await broker.lease(6000, ttl_s=30)
    broker.devices.free["gpu0"] = 4000
    broker.clock.advance(30)
    assert not (await broker.lease(5000)).granted


async def test_leases_outlive_the_broker(tmp_path):
    async with running_broker(tmp_path) as broker:
        kept = await broker.lease(6000)
        await broker.stub.Release(pb.ReleaseRequest(lease_id=(await broker.lease(100)).lease_id))
    async with running_broker(tmp_path, clock=broker.clock) as broker:
        state = await broker.state()
        assert [each.lease_id for each in state.leases] == [kept.lease_id]
        assert state.counters.granted_total == 2
        assert not (await broker.lease(5000)).granted
        assert (await broker.stub.Renew(pb.RenewRequest(lease_id=kept.lease_id))).lease.ttl_s == 120


async def test_a_broken_file_stops_grants_for_the_longest_ttl(tmp_path):
    async with running_broker(tmp_path) as broker:
        await broker.lease(6000)
    (tmp_path / "vram" / "leases.test").write_bytes(b"nonsense")
    async with running_broker(tmp_path, clock=broker.clock, max_ttl_s=300) as broker:
        denied = await broker.lease(1)
        assert denied.denied.reason == pb.DENIAL_REASON_SETTLING
        assert denied.denied.retry_after_ms == 300_000
        assert (await broker.state()).settling_ms == 300_000
        broker.clock.advance(300)
        assert (await broker.lease(1)).granted


async def test_the_same_key_answers_with_the_same_lease_and_other_contents_conflict(broker):
    first = await broker.lease(6000, idempotency_key="k")
    again = await broker.lease(6000, idempotency_key="k")
    assert again.lease_id == first.lease_id
    error = await refused(broker.lease(5999, idempotency_key="k"))
    assert (error.reason, error.field) == (Reason.CONFLICT, "idempotency_key")


async def test_who_names_no_tier_has_the_callers(broker):
    lease = await broker.lease(1)
    named = await broker.lease(1, tier=admission_pb2.TIER_PAID)
    tiers = {each.lease_id: each.tier for each in (await broker.state()).leases}
    assert tiers == {lease.lease_id: admission_pb2.TIER_FREE, named.lease_id: admission_pb2.TIER_PAID}


ITEM = pb.LeaseItem(device="gpu0", size_mib=10)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.LeaseRequest(items=[ITEM]), "tenant"),
        (pb.LeaseRequest(tenant="t" * 129, items=[ITEM]), "tenant"),
        (pb.LeaseRequest(tenant="a\nb", items=[ITEM]), "tenant"),
        (pb.LeaseRequest(tenant="t"), "items"),
        (pb.LeaseRequest(tenant="t", items=[ITEM] * 33), "items"),
        (pb.LeaseRequest(tenant="t", items=[ITEM, ITEM]), "items"),
        (pb.LeaseRequest(tenant="t", items=[pb.LeaseItem(device="gpu0")]), "items[0].size_mib"),
        (pb.LeaseRequest(tenant="t", items=[pb.LeaseItem(size_mib=2**40)]), "items[0].size_mib"),
        (pb.LeaseRequest(tenant="t", items=[pb.LeaseItem(device="", size_mib=1)]), "items[0].device"),
        (pb.LeaseRequest(tenant="t", items=[ITEM, pb.LeaseItem(size_mib=5, min_size_mib=6)]), "items[1].min_size_mib"),
        (pb.LeaseRequest(tenant="t", items=[pb.LeaseItem(size_mib=5, min_size_mib=0)]), "items[0].min_size_mib"),
        (
            pb.LeaseRequest(tenant="t", items=[pb.LeaseItem(size_mib=5, materialised_mib=6)]),
            "items[0].materialised_mib",
        ),
        (pb.LeaseRequest(tenant="t", items=[ITEM], ttl_s=0), "ttl_s"),
        (pb.LeaseRequest(tenant="t", items=[ITEM], ttl_s=3601), "ttl_s"),
        (pb.LeaseRequest(tenant="t", items=[ITEM], wait_ms=600_001), "wait_ms"),
        (pb.LeaseRequest(tenant="t", items=[ITEM], tier=9), "tier"),
        (pb.LeaseRequest(tenant="t", items=[ITEM], pid=2**31), "pid"),
        (pb.LeaseRequest(tenant="t", items=[ITEM], purpose="p" * 257), "purpose"),
        (pb.LeaseRequest(tenant="t", items=[ITEM], idempotency_key="k" * 129), "idempotency_key"),
        (pb.LeaseRequest(tenant="t", items=[ITEM], reload_cost_s=-1), "reload_cost_s"),
    ],
)
async def test_every_field_that_cannot_be_used_is_named(broker, request_, field):
    error = await refused(broker.stub.Lease(request_))
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, field)
    assert not (await broker.state()).leases


async def test_what_does_not_exist_is_not_found(broker):
    error = await refused(broker.lease(1, device="gpu7"))
    assert (error.reason, error.field) == (Reason.NOT_FOUND, "items[0].device")
    error = await refused(broker.stub.Renew(pb.RenewRequest(lease_id="nobody's")))
    assert (error.reason, error.field) == (Reason.NOT_FOUND, "lease_id")
    lease = await broker.lease(1)
    item = pb.RenewItem(device="gpu1")
    error = await refused(broker.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id, items=[item])))
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "items[0].device")
    item = pb.RenewItem(device="gpu0", size_mib=0)
    error = await refused(broker.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id, items=[item])))
    assert error.field == "items[0].size_mib"
    for request in (pb.RenewRequest(), pb.RenewRequest(lease_id=lease.lease_id, reclaim_id="r")):
        assert (await refused(broker.stub.Renew(request))).reason is Reason.INVALID_REQUEST
    assert (await refused(broker.stub.Release(pb.ReleaseRequest()))).field == "lease_id"


# ---- the driver --------------------------------------------------------------------------------------------------


async def test_a_driver_that_fails_is_unknown_and_nothing_is_asked_back(tmp_path):
    async with running_broker(tmp_path, fresh_s=0) as broker:
        lease = await broker.lease(6000, reclaimable=True)
        heard = Heard(broker, tenant="t")
        await heard.next("snapshot")
        broker.devices.failure = "the card fell off the bus"
        broker.clock.advance(1)
        denied = await broker.lease(1, "u", reclaim=True)
        assert denied.denied.reason == pb.DENIAL_REASON_DRIVER_UNKNOWN
        assert "fell off the bus" in denied.denied.message
        assert denied.denied.retry_after_ms == 500
        assert dict(denied.headroom_mib) == {}
        state = await broker.state()
        (device,) = state.devices
        assert device.driver == pb.DRIVER_STATE_UNKNOWN
        assert not device.HasField("free_mib")
        assert state.counters.reclaims_total == 0
        assert [each.lease_id for each in state.leases] == [lease.lease_id]
        assert (await broker.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id))).lease.ttl_s == 120
        broker.devices.failure = ""
        assert not (await broker.lease(1, "u")).granted, "not asked again during the pause"
        broker.clock.advance(0.5)
        assert (await broker.lease(1, "u")).granted
        await heard.end()


async def test_a_process_id_of_another_container_is_not_believed(tmp_path):
    devices = Devices(used={"gpu0": {77: 6000}})
    async with running_broker(tmp_path, devices, trust_pids=False) as broker:
        lease = await broker.lease(6000, pid=77)
        renewed = await broker.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id, pid=77))
        assert not renewed.lease.HasField("pid")
        (device,) = (await broker.state()).devices
        assert device.promised_mib == 6000


async def test_the_state_tells_who_uses_what(tmp_path):
    devices = Devices(free={"gpu0": 4000, "gpu1": 9000}, used={"gpu0": {1: 100}})
    async with running_broker(tmp_path, devices, keep_free_mb=1024, reserve=("netwrck:2048",)) as broker:
        lease = await broker.lease(500, pid=1)
        devices.used["gpu0"] = {1: 400, 99_999_999: 3}
        devices.free["gpu0"] = 3700
        await broker.broker.refresh()
        state = await broker.state()
        first, second = state.devices
        assert (first.total_mib, first.free_mib, first.granted_mib, first.promised_mib) == (10_000, 3700, 500, 200)
        assert (first.reserved_mib, second.reserved_mib, first.keep_free_mib) == (2048, 0, 1024)
        assert [each.headroom_mib for each in first.headroom] == [1452, 940, 684, 428]
        assert [(each.pid, each.used_mib, each.lease_id) for each in first.processes] == [
            (1, 400, lease.lease_id),
            (99_999_999, 3, ""),
        ]
        assert first.processes[0].name
        assert not first.processes[1].HasField("lease_id")
        assert [(each.name, each.device, each.size_mib) for each in state.reserves] == [("netwrck", "gpu0", 2048)]
        only = await broker.stub.GetState(pb.GetStateRequest(devices=["gpu1"]))
        assert [each.device for each in only.devices] == ["gpu1"]
        assert not only.leases


# ---- waiting -----------------------------------------------------------------------------------------------------


async def test_who_waits_gets_the_room_that_another_gives_back(broker):
    first = await broker.lease(6000)
    waiting = asyncio.create_task(broker.lease(5000, "u", wait_ms=60_000))
    await until(lambda: broker.broker.waiting == 1)
    await broker.stub.Release(pb.ReleaseRequest(lease_id=first.lease_id))
    assert (await waiting).granted
    assert broker.broker.waiting == 0


async def test_who_waits_gets_the_room_of_a_tenant_that_died(broker):
    await broker.lease(6000, ttl_s=30)
    waiting = asyncio.create_task(broker.lease(5000, "u", wait_ms=60_000))
    await until(lambda: broker.broker.waiting == 1)
    broker.clock.advance(30)
    assert (await waiting).granted


async def test_a_wait_ends_with_a_denial_that_says_so(broker):
    await broker.lease(6000)
    waiting = asyncio.create_task(broker.lease(5000, "u", wait_ms=60_000))
    await until(lambda: broker.broker.waiting == 1)
    broker.clock.advance(60)
    denied = await waiting
    assert denied.denied.reason == pb.DENIAL_REASON_WAIT_OVER
    assert "Waited 60 s" in denied.denied.message


async def test_better_tiers_are_served_first_and_nobody_is_overtaken(broker):
    first = await broker.lease(10_000)
    tasks = {}
    for tenant, tier in (("free", admission_pb2.TIER_FREE), ("paid", admission_pb2.TIER_PAID)):
        tasks[tenant] = asyncio.create_task(broker.lease(6000, tenant, wait_ms=60_000, tier=tier))
        await until(lambda: broker.broker.waiting == len(tasks))
    await broker.stub.Release(pb.ReleaseRequest(lease_id=first.lease_id))
    assert (await tasks["paid"]).granted
    small = await broker.lease(1, "small")
    assert not small.granted
    assert "free (tier free) came first" in small.denied.message
    assert (await broker.lease(1, "better", tier=admission_pb2.TIER_SUB)).granted
    assert not tasks["free"].done()
    tasks["free"].cancel()


async def test_a_caller_that_leaves_while_waiting_takes_nothing(broker):
    first = await broker.lease(6000)
    waiting = asyncio.create_task(broker.lease(5000, "u", wait_ms=60_000))
    await until(lambda: broker.broker.waiting == 1)
    waiting.cancel()
    await until(lambda: broker.broker.waiting == 0)
    await broker.stub.Release(pb.ReleaseRequest(lease_id=first.lease_id))
    assert (await broker.lease(10_000)).granted


async def test_a_drain_refuses_who_waits(tmp_path):
    async with running_broker(tmp_path) as broker:
        await broker.lease(6000)
        waiting = asyncio.create_task(broker.lease(5000, "u", wait_ms=60_000))
        await until(lambda: broker.broker.waiting == 1)
        broker.broker.drain()
        assert (await refused(broker.lease(1))).reason is Reason.DRAINING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await waiting
        assert failure.value.code() is not grpc.StatusCode.OK


# ---- watching, and memory asked back -----------------------------------------------------------------------------


class Heard:
    """A tenant that watches."""

    def __init__(self, broker, **request):
        self.call = broker.stub.Watch(pb.WatchRequest(**request))
        self.unread = []

    async def next(self, kind):
        """Return the next event of a kind; others stay."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for event in self.unread:
                    if event.WhichOneof("event") == kind:
                        self.unread.remove(event)
                        return getattr(event, kind)
                self.unread.append(await self.call.read())

    async def end(self):
        self.call.cancel()


async def test_a_tenant_that_offered_its_memory_is_asked_for_it_and_the_asker_waits(broker):
    held = await broker.lease(8000, "llm", reclaimable=True, purpose="idle model")
    heard = Heard(broker, tenant="llm")
    assert [each.lease_id for each in (await heard.next("snapshot")).leases] == [held.lease_id]
    waiting = asyncio.create_task(broker.lease(5000, "image", reclaim=True, wait_ms=60_000))
    asked = await heard.next("reclaim_requested")
    assert (asked.lease_id, asked.device, asked.size_mib) == (held.lease_id, "gpu0", 3000)
    assert asked.reason == pb.RECLAIM_REASON_TENANT_WAITS
    assert asked.waiting_tier == admission_pb2.TIER_FREE
    (lease,) = (await broker.state()).leases
    assert lease.reclaim_id == asked.reclaim_id
    working = pb.RenewRequest(
        lease_id=held.lease_id, reclaim_id=asked.reclaim_id, reclaim_answer=pb.RECLAIM_ANSWER_WORKING
    )
    await broker.stub.Renew(working)
    assert not waiting.done()
    release = pb.ReleaseRequest(lease_id=held.lease_id, reason=pb.LEASE_END_RECLAIMED, reclaim_id=asked.reclaim_id)
    await broker.stub.Release(release)
    assert (await waiting).granted
    counters = (await broker.state()).counters
    assert (counters.reclaims_total, counters.reclaims_freed_total) == (1, 1)
    assert counters.ended_total == {"LEASE_END_RECLAIMED": 1}
    await heard.end()


@pytest.mark.parametrize("answer", [pb.RECLAIM_ANSWER_BUSY, pb.RECLAIM_ANSWER_PINNED])
async def test_who_refuses_is_not_asked_again_and_the_next_one_is(broker, answer):
    cheap = await broker.lease(4000, "a", reclaimable=True, reload_cost_s=1)
    dear = await broker.lease(4000, "b", reclaimable=True, reload_cost_s=9)
    first, second = Heard(broker, tenant="a"), Heard(broker, tenant="b")
    for heard in (first, second):
        await heard.next("snapshot")
    waiting = asyncio.create_task(broker.lease(5000, "c", reclaim=True, wait_ms=60_000))
    asked = await first.next("reclaim_requested")
    await broker.stub.Renew(
        pb.RenewRequest(lease_id=cheap.lease_id, reclaim_id=asked.reclaim_id, reclaim_answer=answer)
    )
    asked = await second.next("reclaim_requested")
    shrink = [pb.RenewItem(device="gpu0", size_mib=1000)]
    await broker.stub.Renew(
        pb.RenewRequest(
            lease_id=dear.lease_id,
            items=shrink,
            reclaim_id=asked.reclaim_id,
            reclaim_answer=pb.RECLAIM_ANSWER_FREED,
        )
    )
    assert (await waiting).granted
    assert (await broker.state()).counters.reclaims_total == 2
    await first.end()
    await second.end()


async def test_a_request_is_withdrawn_when_the_asker_leaves(broker):
    await broker.lease(8000, "llm", reclaimable=True)
    heard = Heard(broker, tenant="llm")
    await heard.next("snapshot")
    waiting = asyncio.create_task(broker.lease(5000, "image", reclaim=True, wait_ms=60_000))
    asked = await heard.next("reclaim_requested")
    waiting.cancel()
    assert await heard.next("reclaim_withdrawn") == asked.reclaim_id
    await heard.end()


async def test_nobody_is_asked_who_does_not_watch_or_did_not_offer(broker):
    await broker.lease(4000, "away", reclaimable=True)
    await broker.lease(4000, "here")
    heard = Heard(broker, tenant="here")
    await heard.next("snapshot")
    await broker.lease(5000, "asker", reclaim=True)
    assert (await broker.state()).counters.reclaims_total == 0
    await heard.end()


async def test_an_observer_hears_what_happens_in_order(broker):
    heard = Heard(broker, events=True)
    await heard.next("snapshot")
    lease = await broker.lease(6000)
    await broker.lease(5000, "u")
    await broker.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id, reason=pb.LEASE_END_IDLE))
    assert (await heard.next("lease_changed")).lease.lease_id == lease.lease_id
    assert (await heard.next("denial")).tenant == "u"
    ended = await heard.next("lease_ended")
    assert (ended.lease.lease_id, ended.reason) == (lease.lease_id, pb.LEASE_END_IDLE)
    assert (await heard.next("device_changed")).device == "gpu0"
    await heard.end()


async def test_the_operator_revokes_a_lease_and_asks_for_room(broker):
    lease = await broker.lease(8000, "llm", reclaimable=True)
    heard = Heard(broker, tenant="llm")
    await heard.next("snapshot")
    answer = await broker.admin.ReclaimMemory(pb.ReclaimMemoryRequest(device="gpu0", size_mib=5000))
    assert (answer.enough, answer.asked, answer.headroom_mib) == (False, 1, 2000)
    asked = await heard.next("reclaim_requested")
    assert (asked.size_mib, asked.reason) == (3000, pb.RECLAIM_REASON_OPERATOR)
    assert (await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id, reason="stuck"))).revoked
    assert await heard.next("reclaim_withdrawn") == asked.reclaim_id
    assert not (await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))).revoked
    answer = await broker.admin.ReclaimMemory(pb.ReclaimMemoryRequest(device="gpu0", size_mib=5000))
    assert (answer.enough, answer.asked) == (True, 0)
    await heard.end()
    for request, field in (
        (pb.ReclaimMemoryRequest(device="gpu0"), "size_mib"),
        (pb.ReclaimMemoryRequest(device="gpu7", size_mib=1), "device"),
        (pb.ReclaimMemoryRequest(device="gpu0", size_mib=1, wait_ms=10**6), "wait_ms"),
    ):
        assert (await refused(broker.admin.ReclaimMemory(request))).field == field


# ---- the page cache ----------------------------------------------------------------------------------------------


def host_with(folder, *, available_mib: int, total_mib: int = 1000) -> None:
    """Show a machine with so much memory."""
    (folder / "proc").mkdir(parents=True, exist_ok=True)
    text = f"MemTotal: {total_mib * 1024} kB\nMemAvailable: {available_mib * 1024} kB\n"
    (folder / "proc/meminfo").write_text(text)


@asynccontextmanager
async def engine(broker, state_dir):
    """Call the broker as an engine does: who names files is a service of the mesh."""
    async with open_channel(f"127.0.0.1:{broker.port}", caller="llm", state_dir=state_dir) as channel:
        yield vram_pb2_grpc.VramServiceStub(channel)


async def memory_of(broker, state: int) -> pb.GetHostMemoryResponse:
    """Return the host's memory as soon as the first file of the set is in a state."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            memory = await broker.stub.GetHostMemory(pb.GetHostMemoryRequest())
            if memory.files[0].state == state:
                return memory
            await asyncio.sleep(0.01)


async def test_the_hosts_memory_is_told(broker):
    memory = await broker.stub.GetHostMemory(pb.GetHostMemoryRequest())
    assert 0 < memory.available_mib <= memory.total_mib
    assert (memory.enabled, memory.keep_free_percent, memory.chunk_mib) == (True, 5, 64)
    assert not memory.files


async def test_weights_are_read_ahead_down_to_the_floor_and_on_when_there_is_room_again(tmp_path):
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(bytes(150 * 2**20))
    host_with(tmp_path / "host", available_mib=100)
    async with running_broker(tmp_path, host_root=tmp_path / "host") as broker, engine(broker, tmp_path) as llm:
        added = await llm.WarmFiles(pb.WarmFilesRequest(paths=[str(weights)]))
        assert [(file.path, file.size_mib, file.source) for file in added.files] == [(str(weights), 150, "llm")]
        stopped = await memory_of(broker, pb.WARM_STATE_STOPPED_AT_FLOOR)
        assert stopped.files[0].advised_mib == 0
        host_with(tmp_path / "host", available_mib=900)
        warm = await memory_of(broker, pb.WARM_STATE_WARM)
        assert warm.files[0].advised_mib == 150
        assert warm.files[0].HasField("cached_mib")


async def test_a_file_that_goes_away_is_told_and_one_that_never_was_is_refused(tmp_path):
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"x")
    host_with(tmp_path / "host", available_mib=10)
    async with (
        running_broker(tmp_path, host_root=tmp_path / "host", warm_dirs=(tmp_path,)) as broker,
        engine(broker, tmp_path) as llm,
    ):
        await llm.WarmFiles(pb.WarmFilesRequest(paths=[str(weights)]))
        await memory_of(broker, pb.WARM_STATE_STOPPED_AT_FLOOR)
        weights.unlink()
        host_with(tmp_path / "host", available_mib=900)
        failed = await memory_of(broker, pb.WARM_STATE_FAILED)
        assert "No such file" in failed.files[0].failure
        for paths, reason, field in (
            ([], Reason.INVALID_REQUEST, "paths"),
            (["weights.gguf"], Reason.INVALID_REQUEST, "paths[0]"),
            ([str(tmp_path)], Reason.INVALID_REQUEST, "paths[0]"),
            ([str(tmp_path / "host/proc/meminfo"), "/etc/passwd"], Reason.INVALID_REQUEST, "paths[1]"),
            ([str(tmp_path / "../../etc/passwd")], Reason.INVALID_REQUEST, "paths[0]"),
            ([str(weights)], Reason.NOT_FOUND, "paths[0]"),
        ):
            error = await refused(llm.WarmFiles(pb.WarmFilesRequest(paths=paths)))
            assert (error.reason, error.field) == (reason, field)
        assert len((await broker.stub.GetHostMemory(pb.GetHostMemoryRequest())).files) == 1


async def test_nothing_is_read_ahead_where_it_is_switched_off(tmp_path):
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"x")
    async with running_broker(tmp_path, ram_prefetch_enabled=False) as broker, engine(broker, tmp_path) as llm:
        await llm.WarmFiles(pb.WarmFilesRequest(paths=[str(weights)]))
        memory = await broker.stub.GetHostMemory(pb.GetHostMemoryRequest())
        assert (memory.enabled, memory.files[0].state) == (False, pb.WARM_STATE_PENDING)


# ---- races -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
async def test_two_tenants_that_race_over_grpc_never_both_get_the_same_bytes(broker):
    for _ in range(RACES):
        results = await asyncio.gather(broker.lease(6000, "a"), broker.lease(6000, "b"))
        won = [each for each in results if each.granted]
        assert len(won) == 1
        await broker.stub.Release(pb.ReleaseRequest(lease_id=won[0].lease_id))


async def test_who_waits_under_a_key_that_another_takes_hears_of_the_conflict(broker):
    first = await broker.lease(6000)
    waiting = asyncio.create_task(broker.lease(5000, "u", wait_ms=60_000, idempotency_key="k"))
    await until(lambda: broker.broker.waiting == 1)
    assert (await broker.lease(100, "u", idempotency_key="k", tier=admission_pb2.TIER_PAID)).granted
    await broker.stub.Release(pb.ReleaseRequest(lease_id=first.lease_id))
    assert (await refused(waiting)).reason is Reason.CONFLICT
    assert broker.broker.waiting == 0
