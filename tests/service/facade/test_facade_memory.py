"""Leases over REST: the operator's routes, their names, and what never gets through."""

import asyncio

import httpx
import pytest

from omniserve.admission.v1 import admission_pb2
from omniserve.vram.v1 import vram_pb2 as pb
from services.kit.errors import DomainError, Reason


@pytest.fixture
async def operator(mesh):
    async with httpx.AsyncClient(base_url=mesh.url, headers=mesh.token("envoy-operator"), timeout=30) as http:
        yield http


ROUTES = [
    ("GET", "/v1/gpu/vram"),
    ("POST", "/v1/gpu/lease"),
    ("POST", "/v1/gpu/renew"),
    ("POST", "/v1/gpu/release"),
    ("GET", "/v1/host/memory"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_who_comes_by_the_public_door_finds_nothing_whatever_it_claims(shared_mesh, method, path):
    claims = {"x-omniserve-listener": "operator", "x-omniserve-tier": "paid", "x-omniserve-client": "operator"}
    answer = await shared_mesh.http.request(method, path, json={"tenant": "t", "size_mib": 1}, headers=claims)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "not_found")
    assert shared_mesh.vram.asked == []


async def test_a_grant_tells_what_may_be_relied_on(mesh, operator):
    mesh.vram.answer = pb.LeaseResponse(
        granted=True,
        lease_id="abc",
        items=[pb.LeasedItem(device="gpu0", size_mib=4096, materialised_mib=7, source=pb.MATERIALISED_SOURCE_TENANT)],
        ttl_s=120,
        headroom_mib={"gpu0": 5},
    )
    body = {
        "tenant": "t",
        "size_mib": 5000,
        "min_size_mib": 4000,
        "device": "gpu0",
        "materialised_mib": 7,
        "tier": "sub",
        "ttl_s": 60,
        "pid": 9,
        "reclaimable": True,
        "purpose": "p",
        "reclaim": True,
        "wait_ms": 10,
        "idempotency_key": "k",
        "reload_cost_s": 2.5,
    }
    answer = await operator.post("/v1/gpu/lease", json=body)
    assert answer.json() == {
        "granted": True,
        "lease_id": "abc",
        "items": [{"device": "gpu0", "size_mib": 4096, "materialised_mib": 7, "source": "tenant"}],
        "size_mib": 4096,
        "ttl_s": 120,
        "headroom_mib": {"gpu0": 5},
    }
    (asked,) = mesh.vram.asked
    assert asked == pb.LeaseRequest(
        tenant="t",
        items=[pb.LeaseItem(device="gpu0", size_mib=5000, min_size_mib=4000, materialised_mib=7)],
        tier=admission_pb2.TIER_SUB,
        ttl_s=60,
        pid=9,
        reclaimable=True,
        purpose="p",
        reclaim=True,
        wait_ms=10,
        idempotency_key="k",
        reload_cost_s=2.5,
    )


async def test_a_denial_is_a_200_that_says_granted_false(mesh, operator):
    mesh.vram.answer = pb.LeaseResponse(
        denied=pb.Denied(
            reason=pb.DENIAL_REASON_NO_HEADROOM, message="too little", device="gpu0", headroom_mib=-5, retry_after_ms=70
        ),
        headroom_mib={"gpu0": -5},
    )
    answer = await operator.post("/v1/gpu/lease", json={"tenant": "t", "items": [{"size_mib": 1}]})
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "granted": False,
            "reason": "no_headroom",
            "message": "too little",
            "device": "gpu0",
            "headroom_mib": {"gpu0": -5},
            "retry_after_ms": 70,
        },
    )
    assert mesh.vram.callers == [("facade", "anonymous", "free")]


async def test_renewals_and_releases_go_through(mesh, operator):
    body = {
        "lease_id": "abc",
        "items": [{"device": "gpu0", "materialised_mib": 0, "size_mib": 5}],
        "ttl_s": 9,
        "reclaimable": False,
        "pid": 3,
        "reclaim_id": "r",
        "reclaim_answer": "freed",
    }
    assert (await operator.post("/v1/gpu/renew", json=body)).status_code == 200
    answer = await operator.post("/v1/gpu/release", json={"lease_id": "abc", "reason": "load_failed"})
    assert answer.json() == {"released": True}
    renewed, released = mesh.vram.asked
    assert renewed == pb.RenewRequest(
        lease_id="abc",
        items=[pb.RenewItem(device="gpu0", materialised_mib=0, size_mib=5)],
        ttl_s=9,
        reclaimable=False,
        pid=3,
        reclaim_id="r",
        reclaim_answer=pb.RECLAIM_ANSWER_FREED,
    )
    assert released == pb.ReleaseRequest(lease_id="abc", reason=pb.LEASE_END_LOAD_FAILED)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("lease", {"size_mib": 1}, "tenant"),
        ("lease", {"tenant": "t"}, "size_mib"),
        ("lease", {"tenant": "t", "size_mib": 0}, "size_mib"),
        ("lease", {"tenant": "t", "size_mib": "many"}, "size_mib"),
        ("lease", {"tenant": "t", "size_mib": 1.5}, "size_mib"),
        ("lease", {"tenant": "t", "size_mib": 2**32}, "size_mib"),
        ("lease", {"tenant": "t", "items": []}, "items"),
        ("lease", {"tenant": "t", "items": [{"device": "gpu0"}]}, "items[0].size_mib"),
        ("lease", {"tenant": "t", "items": [{"size_mib": 1}], "device": "gpu0"}, "device"),
        ("lease", {"tenant": "t", "items": [{"size_mib": 1, "mib": 1}]}, "items[0].mib"),
        ("lease", {"tenant": "t", "size_mib": 1, "tier": "gold"}, "tier"),
        ("lease", {"tenant": "t", "size_mib": 1, "ttl_s": 0}, "ttl_s"),
        ("lease", {"tenant": "t", "size_mib": 1, "pid": -1}, "pid"),
        ("lease", {"tenant": "t", "size_mib": 1, "wait_ms": 10**9}, "wait_ms"),
        ("lease", {"tenant": "t", "size_mib": 1, "reclaim": "yes"}, "reclaim"),
        ("lease", {"tenant": "t", "size_mib": 1, "reload_cost_s": -1}, "reload_cost_s"),
        ("lease", {"tenant": "t", "size_mb": 1}, "size_mb"),
        ("renew", {}, "lease_id"),
        ("renew", {"lease_id": ""}, "lease_id"),
        ("renew", {"lease_id": "a", "items": [{}]}, "items[0].device"),
        ("renew", {"lease_id": "a", "items": [{"device": "gpu0", "size_mib": 0}]}, "items[0].size_mib"),
        ("renew", {"lease_id": "a", "reclaim_answer": "perhaps"}, "reclaim_answer"),
        ("release", {}, "lease_id"),
        ("release", {"lease_id": "a", "reason": "because"}, "reason"),
    ],
)
async def test_every_malformed_field_is_named(shared_mesh, path, body, field):
    operator = shared_mesh.token("envoy-operator")
    answer = await shared_mesh.http.post(f"/v1/gpu/{path}", json=body, headers=operator)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert shared_mesh.vram.asked == []


async def test_what_the_broker_refuses_keeps_its_status_and_its_field(mesh, operator):
    mesh.vram.answer = DomainError(Reason.NOT_FOUND, "no such lease", field="lease_id")
    answer = await operator.post("/v1/gpu/renew", json={"lease_id": "abc"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lease_id")
    mesh.vram.answer = DomainError(Reason.CONFLICT, "in use", field="idempotency_key")
    answer = await operator.post("/v1/gpu/lease", json={"tenant": "t", "size_mib": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "idempotency_key")


async def test_a_body_without_items_hears_of_its_own_fields(mesh, operator):
    mesh.vram.answer = DomainError(Reason.NOT_FOUND, "no device 'gpu7'", field="items[0].device")
    short = await operator.post("/v1/gpu/lease", json={"tenant": "t", "size_mib": 1, "device": "gpu7"})
    assert (short.status_code, short.json()["error"]["param"]) == (404, "device")
    body = {"tenant": "t", "items": [{"size_mib": 1, "device": "gpu7"}]}
    assert (await operator.post("/v1/gpu/lease", json=body)).json()["error"]["param"] == "items[0].device"


async def test_a_caller_that_hangs_up_while_it_waits_takes_nothing(mesh, operator):
    body = {"tenant": "t", "size_mib": 1, "purpose": "wait", "wait_ms": 600_000}
    waiting = asyncio.ensure_future(operator.post("/v1/gpu/lease", json=body))
    async with asyncio.timeout(60):
        while not mesh.vram.asked:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await mesh.vram.leaving.wait()


UNKNOWN = pb.DeviceState(device="gpu1", driver=pb.DRIVER_STATE_UNKNOWN, driver_error="gone", driver_retry_ms=5)
KNOWN = pb.DeviceState(
    device="gpu0",
    kind=pb.DEVICE_KIND_GPU,
    driver=pb.DRIVER_STATE_OK,
    total_mib=8192,
    free_mib=3072,
    granted_mib=100,
    headroom=[
        pb.TierHeadroom(tier=admission_pb2.TIER_PAID, headroom_mib=3000),
        pb.TierHeadroom(tier=admission_pb2.TIER_BACKGROUND, headroom_mib=1976),
    ],
    processes=[pb.ProcessUse(pid=7, used_mib=1, lease_id="secret")],
)
LEASE = pb.LeaseState(lease_id="secret", tenant="t", tier=admission_pb2.TIER_FREE)
COUNTERS = pb.LeaseCounters(
    denied_total={"DENIAL_REASON_NO_HEADROOM": 2, "DENIAL_REASON_SETTLING": 1},
    ended_total={"LEASE_END_EXPIRED": 4, "LEASE_END_IDLE": 5, "LEASE_END_DONE": 6},
)


async def test_the_account_is_led_by_the_figures_that_dashboards_look_for(mesh, operator):
    mesh.vram.answer = pb.GetStateResponse(devices=[KNOWN], leases=[LEASE], counters=COUNTERS, enabled=True)
    answer = (await operator.get("/v1/gpu/vram")).json()
    assert answer["vram_available"] is True
    assert answer["omniserve_vram_free_gib"] == 3.0
    assert answer["omniserve_vram_headroom_mb"] == 1976
    assert answer["omniserve_vram_leases"] == 1
    assert answer["omniserve_vram_denials_total"] == 3
    assert answer["omniserve_vram_lease_expiries_total"] == 4
    assert answer["omniserve_vram_evictions_total"] == {"idle": 5}
    assert answer["counters"]["denied_total"] == {"no_headroom": 2, "settling": 1}
    assert answer["devices"][0]["kind"] == "gpu"
    assert answer["devices"][0]["headroom"][0] == {"tier": "paid", "headroom_mib": 3000}
    assert answer["leases"][0]["lease_id"] == "secret"


async def test_unknown_is_minus_one_and_not_nothing(mesh, operator):
    mesh.vram.answer = pb.GetStateResponse(devices=[KNOWN, UNKNOWN], enabled=True)
    answer = (await operator.get("/v1/gpu/vram")).json()
    assert answer["vram_available"] is False
    assert answer["omniserve_vram_free_gib"] == -1
    assert "omniserve_vram_headroom_mb" not in answer
    assert answer["devices"][1]["driver"] == "unknown"
    assert "free_mib" not in answer["devices"][1]


async def test_status_shows_the_account_without_what_would_let_others_act_on_it(mesh):
    mesh.vram.answer = pb.GetStateResponse(devices=[KNOWN], leases=[LEASE], enabled=True)
    answer = await mesh.http.get("/status")
    assert answer.json()["vram_available"] is True
    assert answer.json()["services"]["vram"]["omniserve_vram_free_gib"] == 3.0
    assert answer.json()["services"]["vram"]["leases"][0]["tenant"] == "t"
    assert "secret" not in answer.text


async def test_the_hosts_memory_is_shown(mesh, operator):
    assert (await operator.get("/v1/host/memory")).json()["total_mib"] == 9
