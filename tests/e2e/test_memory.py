"""Leases through the whole mesh: REST and gRPC on the operator's listener, the command line, a killed broker."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import httpx
import pytest

from omniserve.vram.v1 import vram_pb2, vram_pb2_grpc
from omniserve_client import LeaseClient

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def operator(mesh):
    with httpx.Client(base_url=mesh.operator_url, timeout=30) as http:
        yield http


def omniserve(mesh, *arguments):
    environ = {**mesh.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=90, check=False)


def test_a_lease_lives_over_rest_and_its_end_is_counted(mesh, operator):
    granted = operator.post("/v1/gpu/lease", json={"tenant": "e2e", "size_mib": 16, "device": "cpu"}).json()
    assert granted["granted"] is True
    renewed = operator.post(
        "/v1/gpu/renew", json={"lease_id": granted["lease_id"], "items": [{"device": "cpu", "materialised_mib": 4}]}
    ).json()
    assert renewed["lease"]["items"][0]["materialised_mib"] == 4
    state = operator.get("/v1/gpu/vram").json()
    assert state["vram_available"] is True
    assert granted["lease_id"] in {each["lease_id"] for each in state["leases"]}
    status = operator.get("/status").json()
    assert status["vram_available"] is True
    assert status["services"]["vram"]["omniserve_vram_free_gib"] > 0
    body = {"lease_id": granted["lease_id"], "reason": "idle"}
    assert operator.post("/v1/gpu/release", json=body).json() == {"released": True}
    assert operator.post("/v1/gpu/release", json=body).json() == {"released": False}
    assert operator.get("/v1/gpu/vram").json()["omniserve_vram_evictions_total"]["idle"] >= 1
    memory = operator.get("/v1/host/memory").json()
    assert memory["available_mib"] > 0
    assert (memory["enabled"], memory["keep_free_percent"]) == (True, 5)


def test_another_process_takes_the_device_over_and_gives_it_back(operator, mesh):
    held = operator.post("/admin/hold", params={"seconds": 100, "reason": "trainer"}, json={})
    assert held.status_code == 200
    assert (held.json()["drained"], held.json()["in_flight"]) == (True, 0)
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(httpx.post, f"{mesh.public_url}/v1/chat/completions", json=asked, timeout=120)
        pools = operator.get("/status").json()["services"]["admission"]["pools"]
        while not any(pool["waiting"] for pool in pools):
            assert not answer.done(), "nothing begins while the device is held"
            pools = operator.get("/status").json()["services"]["admission"]["pools"]
        assert operator.post("/admin/release", json={}).json() == {"released": True}
        assert answer.result().status_code == 200
    assert operator.post("/admin/release", json={}).json() == {"released": False}


def test_the_figures_are_there_for_prometheus_and_for_the_operator_only(operator, mesh):
    answer = operator.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert float(told["omniserve_vram_free_gib"]) > 0
    assert told["omniserve_vram_available"] == "1"
    assert told['omniserve_service_stale{service="vram"}'] == "0"
    assert float(told["omniserve_vram_leases"]) >= 0
    assert httpx.get(f"{mesh.public_url}/metrics").status_code == 404


def test_a_denial_is_a_200_and_bad_input_names_its_field(operator):
    denied = operator.post("/v1/gpu/lease", json={"tenant": "e2e", "size_mib": 2**30})
    assert (denied.status_code, denied.json()["granted"]) == (200, False)
    assert denied.json()["reason"] == "larger_than_device"
    bad = operator.post("/v1/gpu/lease", json={"tenant": "e2e", "size_mib": -1})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "size_mib")
    unknown = operator.post("/v1/gpu/renew", json={"lease_id": "nobody's"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "lease_id")
    page = operator.post(
        "/v1/gpu/lease", json={"tenant": "e2e", "size_mib": 1}, headers={"origin": "http://evil.example"}
    )
    assert page.status_code == 403


def test_the_public_door_leads_to_no_lease(mesh):
    for path in ("/v1/gpu/lease", "/v1/gpu/renew", "/v1/gpu/release"):
        assert httpx.post(f"{mesh.public_url}{path}", json={"tenant": "t", "size_mib": 1}).status_code == 404
    for path in ("/v1/gpu/vram", "/v1/host/memory"):
        assert httpx.get(f"{mesh.public_url}{path}").status_code == 404
    with closing(grpc.insecure_channel(mesh.public_target)) as channel:
        stub = vram_pb2_grpc.VramServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failure:
            stub.GetState(vram_pb2.GetStateRequest(), timeout=60)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_client_keeps_its_lease_through_a_kill_of_the_broker(mesh, operator, wait_until):
    with LeaseClient(mesh.operator_target, tenant="survivor") as broker, broker.lease(16, purpose="e2e") as lease:
        old = mesh.kill("vram")
        mesh.wait_replaced("vram", old)

        def held():
            state = operator.get("/v1/gpu/vram")
            return state.status_code == 200 and lease.lease_id in {each["lease_id"] for each in state.json()["leases"]}

        wait_until(held, "the lease is there again")
        lease.report(3)
        wait_until(lambda: 'materialised_mib":3' in operator.get("/v1/gpu/vram").text, "the report has arrived")
        assert not lease.is_lost
    assert lease.lease_id not in operator.get("/v1/gpu/vram").text


def test_the_command_line_leases_and_shows_it(mesh):
    code = (
        "import subprocess, sys; "
        "sys.exit(subprocess.run([sys.executable, '-m', 'cli.main', 'vram', '--json']).returncode)"
    )
    done = omniserve(mesh, "lease", "--mib", "16", "--for", "seen", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "16 MiB leased on cpu" in done.stderr
    state = json.loads(done.stdout)
    assert [each["purpose"] for each in state["leases"] if each["tenant"] == "shell"] == ["seen"]
    assert omniserve(mesh, "lease", "--mib", str(2**30), "--", "true").returncode == 75
    table = omniserve(mesh, "vram")
    assert table.returncode == 0, table.stderr
    assert "cpu" in table.stdout
    assert "larger_than_device" in table.stdout
