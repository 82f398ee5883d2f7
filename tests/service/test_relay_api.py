"""Relay's API with everything real: relay, admission and Envoy as processes, HTTP workers, gRPC."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.relay.v1 import relay_pb2, relay_pb2_grpc
from services.kit.channels import open_channel
from services.kit.errors import Reason, from_rpc_error
from services.kit.tokens import ensure_token
from tests.fixtures.workers import Workers, new_mark, running_workers

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("tts", "remote", "rented", "stt", "managed", "forecast")
SETTINGS = """\
upstreams:
  tts:
    endpoints: [{tts}]
    max_body_mib: 2
    overflow:
      endpoints: [{remote}]
      credential: {{header: x-api-key, env: REMOTE_KEY}}
  stt:
    endpoints: [{stt}]
    overflow:
      endpoints: [{managed}]
      tiers: all
    replay_statuses: [503]
  forecast: {{endpoints: [{forecast}]}}
"""
LOCAL, OVERFLOW = relay_pb2.GROUP_KIND_LOCAL, relay_pb2.GROUP_KIND_OVERFLOW


@dataclass
class Rig:
    """What runs. `environ`: of the processes."""

    state_dir: Path
    environ: dict[str, str]
    workers: Workers
    owner: str = "lane"

    def channel(self, caller: str) -> grpc.aio.Channel:
        return open_channel(
            self.environ["OMNISERVE_RELAY_LISTEN"], caller=caller, state_dir=self.state_dir, peers=("relay",)
        )

    @property
    def config(self) -> Path:
        return Path(self.environ["OMNISERVE_CONFIG"])

    @property
    def public(self) -> str:
        return f"http://127.0.0.1:{self.environ['OMNISERVE_EDGE_PORT']}"

    def settings(self) -> str:
        return SETTINGS.format(**{name: self.workers.url(name) for name in NAMES})

    def speak(self, do, tier="free", **headers):
        orders = {"x-do": do} if isinstance(do, str) else {f"x-do-{name}": each for name, each in do.items()}
        sent = {**orders, "x-omniserve-tier": tier, "content-type": "application/json", **headers}
        return httpx.post(f"{self.public}/v1/audio/speech", headers=sent, content=b"{}", timeout=30)

    def ask(self, path, **headers):
        return httpx.post(f"{self.public}{path}", headers=headers, content=b"{}", timeout=30)

    def logged(self, request_id) -> dict[str, object]:
        """Return the line of a request in Envoy's access log, once it is there."""
        for _ in range(600):
            lines = (self.state_dir / "logs" / "access.log").read_text().split("\n")[:-1]
            for line in map(json.loads, lines):
                if line["request_id"] == request_id:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"{request_id} is not in the access log")

    async def waiting(self) -> int:
        """Return how many wait for a permit."""
        return sum(pool.waiting for pool in await self._pools())

    async def idle(self) -> None:
        """Wait until no permit is held: Envoy tells admission of an exchange's end a moment after its caller has the answer."""
        while any(pool.permits for pool in await self._pools()):
            await asyncio.sleep(0.02)

    async def _pools(self) -> Sequence[admission_pb2.PoolStatus]:
        address = self.environ["OMNISERVE_ADMISSION_LISTEN"]
        async with open_channel(address, caller="facade", state_dir=self.state_dir) as channel:
            stub = admission_pb2_grpc.AdmissionServiceStub(channel)
            return (await stub.GetStatus(admission_pb2.GetStatusRequest())).pools


@contextmanager
def process(command, environ, log):
    with log.open("ab") as output:
        running = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(15)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@pytest.fixture(scope="module")
def rig(tmp_path_factory, free_ports, wait_until) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("relay")
    names = ("EDGE_PORT", "EDGE_OPERATOR_PORT", "EDGE_MESH_PORT", "EDGE_ADMIN_PORT", "admission", "checks", "relay")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    envoy = Path(sys.executable).with_name("envoy")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))}
    environ = {
        **inherited,
        **{f"OMNISERVE_{name}": str(port) for name, port in ports.items() if name.isupper()},
        "OMNISERVE_STATE_DIR": str(folder),
        "OMNISERVE_ADMISSION_LISTEN": f"127.0.0.1:{ports['admission']}",
        "OMNISERVE_ADMISSION_ADDRESS": f"127.0.0.1:{ports['admission']}",
        "OMNISERVE_ADMISSION_CHECKS_LISTEN": f"127.0.0.1:{ports['checks']}",
        "OMNISERVE_EDGE_ADMISSION_CHECKS_ADDRESS": f"127.0.0.1:{ports['checks']}",
        "OMNISERVE_RELAY_LISTEN": f"127.0.0.1:{ports['relay']}",
        "OMNISERVE_RELAY_ADDRESS": f"127.0.0.1:{ports['relay']}",
        "OMNISERVE_RELAY_MESH_LISTENER": f"127.0.0.1:{ports['EDGE_MESH_PORT']}",
        "OMNISERVE_RELAY_STATS_INTERVAL_S": "0.01",
        "OMNISERVE_EDGE_ADDRESS": f"127.0.0.1:{ports['EDGE_OPERATOR_PORT']}",
        "OMNISERVE_EDGE_ENVOY": str(envoy),
        "OMNISERVE_EDGE_DRAIN_NOTICE_S": "1",
        "OMNISERVE_EDGE_DRAIN_LIMIT_S": "1",
        "OMNISERVE_CONFIG": str(folder / "omniserve.yaml"),
        "OMNISERVE_SLOTS": "1",
        "OMNISERVE_DRAIN_GRACE_S": "2",
        "REMOTE_KEY": "remotes-own-key",
    }
    for caller in ("capacity", "cli", "jobs", "facade", "llm"):
        ensure_token(folder, caller)
    with ExitStack() as stack:
        workers = stack.enter_context(running_workers(folder, NAMES, free_ports, wait_until))
        rig = Rig(folder, environ, workers)
        rig.config.write_text(rig.settings())
        subprocess.run([sys.executable, "-m", "deploy.edge"], cwd=ROOT, env=environ, check=True, timeout=60)
        start = lambda *command: stack.enter_context(process(command, environ, folder / "processes.log"))  # noqa: E731
        start(sys.executable, "-m", "services.admission")
        start(sys.executable, "-m", "services.relay")
        start("bash", "envoy/run.sh")
        wait_until(lambda: ready(rig), "Envoy serves")
        yield rig


def ready(rig):
    try:
        return rig.speak("json").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
async def relay(rig):
    """The API as the operator calls it, with the settings as they were."""
    async with rig.channel("cli") as channel:
        admin = relay_pb2_grpc.RelayAdminServiceStub(channel)
        yield relay_pb2_grpc.RelayServiceStub(channel)
        rig.config.write_text(rig.settings())
        await admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30)


@pytest.fixture
async def admin(rig, relay):
    async with rig.channel("cli") as channel:
        yield relay_pb2_grpc.RelayAdminServiceStub(channel)


@pytest.fixture
async def capacity(rig, relay):
    """The API as capacity calls it; what it set is gone afterwards."""
    rig.owner = new_mark()
    async with rig.channel("capacity") as channel:
        stub = relay_pb2_grpc.RelayServiceStub(channel)
        yield stub
        for name in ("tts", "stt"):
            gone = relay_pb2.SetEndpointsRequest(upstream=name, group=OVERFLOW, owner=rig.owner, generation=99)
            await stub.SetEndpoints(gone, timeout=30)


@pytest.fixture
async def jobs(rig):
    async with rig.channel("jobs") as channel:
        yield relay_pb2_grpc.RelayServiceStub(channel)


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def upstreams(relay):
    return {each.name: each for each in (await relay.ListUpstreams(relay_pb2.ListUpstreamsRequest())).upstreams}


async def status(relay, name):
    found = await relay.GetStatus(relay_pb2.GetStatusRequest())
    return next(each for each in found.upstreams if each.name == name)


def rented(rig, generation, *addresses, upstream="tts", **more):
    endpoints = [relay_pb2.Endpoint(address=each, instance_id="i-1") for each in addresses]
    return relay_pb2.SetEndpointsRequest(
        upstream=upstream, group=OVERFLOW, owner=rig.owner, endpoints=endpoints, generation=generation, **more
    )


# ---- what there is ------------------------------------------------------------------------------------------------


async def test_upstreams_are_listed_with_their_groups_and_without_secrets(rig, relay):
    found = await upstreams(relay)
    assert sorted(found) == ["forecast", "stt", "tts"]
    local, overflow = found["tts"].groups
    assert (local.kind, local.endpoints[0].address, local.tiers) == (LOCAL, rig.workers.url("tts"), [])
    assert (overflow.kind, overflow.endpoints[0].address) == (OVERFLOW, rig.workers.url("remote"))
    assert (overflow.tiers, overflow.has_credential) == ([admission_pb2.TIER_PAID], True)
    assert local.endpoints[0].origin == relay_pb2.ENDPOINT_ORIGIN_SETTINGS
    assert "remotes-own-key" not in str(found)


async def test_a_worker_that_answers_is_healthy(rig, relay):
    rig.speak("json")
    found = await upstreams(relay)
    assert found["tts"].groups[0].endpoints[0].health == relay_pb2.ENDPOINT_HEALTH_HEALTHY


async def test_routes_are_listed_with_what_serves_them_or_would(relay):
    found = {each.route_id: each for each in (await relay.ListRoutes(relay_pb2.ListRoutesRequest())).routes}
    assert found["tts.speech"].target == relay_pb2.ROUTE_TARGET_PROXIED
    assert (found["tts.speech"].upstream, found["tts.speech"].method) == ("tts", "POST")
    assert found["forecast.forecasts"].upstream_path == "/forecast"
    absent = found["animation.generations"]
    assert (absent.target, absent.enabling_setting) == (
        relay_pb2.ROUTE_TARGET_DISABLED,
        "OMNISERVE_ANIMATION_UPSTREAM",
    )
    assert found["llm.chat"].target == relay_pb2.ROUTE_TARGET_EMBEDDED
    only = await relay.ListRoutes(relay_pb2.ListRoutesRequest(target=relay_pb2.ROUTE_TARGET_PROXIED))
    assert {each.upstream for each in only.routes} == {"tts", "stt", "forecast"}


async def test_the_status_counts_requests_reuse_and_answers_by_class(rig, relay):
    before = await status(relay, "forecast")
    for do in ("json", "json", "status?code=404"):
        rig.ask("/v1/forecasts", **{"x-do": do})
    after = await status(relay, "forecast")
    assert after.requests_total - before.requests_total == 3
    assert after.responses_total["4xx"] - before.responses_total["4xx"] == 1
    assert after.reused_total > before.reused_total
    assert (after.endpoints, after.healthy_endpoints) == (1, 1)
    assert [gate.epoch_slot for gate in after.gates] == [0, 1]


async def test_the_status_names_the_configuration_and_envoy(relay):
    found = await relay.GetStatus(relay_pb2.GetStatusRequest())
    assert found.envoy_version.count(".") == 2
    assert found.envoy_reachable
    assert not found.draining
    assert found.config_version
    assert found.config_applied_unix_ms > 0
    assert found.stats_age_ms < 60_000
    assert not found.problems


# ---- overflow -----------------------------------------------------------------------------------------------------


async def test_requests_that_left_a_failing_worker_are_counted(rig, relay):
    before = await status(relay, "tts")
    answer = rig.speak({"tts": "status?code=500", "remote": "json"}, tier="paid")
    assert answer.json()["worker"] == "remote"
    after = await status(relay, "tts")
    assert after.overflow_total["local_failed"] - before.overflow_total["local_failed"] == 1
    assert after.overflow_total["saturated"] == before.overflow_total["saturated"]
    assert after.retries_total - before.retries_total == 1


async def test_requests_that_left_a_full_device_are_counted(rig, relay, wait_until):
    before = await status(relay, "tts")
    mark = new_mark()
    holding = asyncio.create_task(asyncio.to_thread(rig.speak, "hold", **{"x-mark": mark}))
    await asyncio.to_thread(rig.workers.one, mark)
    answer = await asyncio.to_thread(rig.speak, "json", tier="paid")
    rig.workers.release(mark)
    await holding
    assert answer.json()["worker"] == "remote"
    after = await status(relay, "tts")
    assert after.overflow_total["saturated"] - before.overflow_total["saturated"] == 1
    assert after.overflow_total["local_failed"] == before.overflow_total["local_failed"]


# ---- live endpoints -----------------------------------------------------------------------------------------------


async def test_endpoints_that_capacity_sets_serve_requests_when_the_call_returns(rig, relay, capacity):
    settings = rig.settings().replace(rig.workers.url("remote"), "http://127.0.0.1:1")
    rig.config.write_text(settings)
    answer = await capacity.SetEndpoints(rented(rig, 1, rig.workers.url("rented"), ttl_s=30), timeout=30)
    assert (answer.ttl_s, bool(answer.config_version)) == (30, True)
    answers = {rig.speak({"tts": "status?code=500"}, tier="paid").json().get("worker") for _ in range(12)}
    assert "rented" in answers
    listed = (await upstreams(relay))["tts"].groups[1].endpoints
    assert [(each.origin, each.instance_id) for each in listed][1] == (relay_pb2.ENDPOINT_ORIGIN_LIVE, "i-1")


async def test_endpoints_bring_an_overflow_to_a_route_that_had_none(rig, capacity, relay):
    await capacity.SetEndpoints(rented(rig, 1, rig.workers.url("rented"), upstream="stt"), timeout=30)
    assert len((await upstreams(relay))["stt"].groups[1].endpoints) == 2


async def test_endpoints_vanish_when_their_owner_is_not_heard_again(rig, relay, capacity):
    before = (await relay.GetStatus(relay_pb2.GetStatusRequest())).config_version
    answer = await capacity.SetEndpoints(rented(rig, 1, rig.workers.url("rented"), ttl_s=1), timeout=30)
    assert answer.config_version != before
    async with asyncio.timeout(30):
        while (await relay.GetStatus(relay_pb2.GetStatusRequest())).config_version != before:
            await asyncio.sleep(0.05)
    assert len((await upstreams(relay))["tts"].groups[1].endpoints) == 1


async def test_an_older_generation_changes_nothing(rig, relay, capacity):
    await capacity.SetEndpoints(rented(rig, 5, rig.workers.url("rented")), timeout=30)
    error = await refused(capacity.SetEndpoints(rented(rig, 4), timeout=30))
    assert (error.reason, error.field) == (Reason.CONFLICT, "generation")
    assert len((await upstreams(relay))["tts"].groups[1].endpoints) == 2


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"upstream": "tss"}, Reason.NOT_FOUND, "upstream"),
        ({"group": relay_pb2.GROUP_KIND_MANAGED}, Reason.NOT_FOUND, "group"),
        ({"group": 0}, Reason.INVALID_REQUEST, "group"),
        ({"owner": ""}, Reason.INVALID_REQUEST, "owner"),
        ({"ttl_s": 0}, Reason.INVALID_REQUEST, "ttl_s"),
        ({"endpoints": [relay_pb2.Endpoint(address="http://8.8.8.8")]}, Reason.INVALID_REQUEST, "endpoints[0].address"),
        (
            {"endpoints": [relay_pb2.Endpoint(address="http://u:p@worker")]},
            Reason.INVALID_REQUEST,
            "endpoints[0].address",
        ),
        (
            {"endpoints": [relay_pb2.Endpoint(address="http://127.0.0.1:1", weight=0)]},
            Reason.INVALID_REQUEST,
            "endpoints[0].weight",
        ),
        (
            {"endpoints": [relay_pb2.Endpoint(address="http://127.0.0.1:1", path_prefix="/../x")]},
            Reason.INVALID_REQUEST,
            "endpoints[0].path_prefix",
        ),
        (
            {"credential": relay_pb2.Credential(header="x-omniserve-tier", value="paid")},
            Reason.INVALID_REQUEST,
            "credential.header",
        ),
        (
            {"credential": relay_pb2.Credential(header="x-key", value="a\r\nb")},
            Reason.INVALID_REQUEST,
            "credential.value",
        ),
    ],
)
async def test_endpoints_that_cannot_be_are_refused_by_field(rig, capacity, change, reason, field):
    asked = {"upstream": "tts", "group": OVERFLOW, "owner": "lane", "generation": 9, **change}
    error = await refused(capacity.SetEndpoints(relay_pb2.SetEndpointsRequest(**asked), timeout=30))
    assert (error.reason, error.field) == (reason, field)


async def test_only_capacity_sets_endpoints(rig, relay, jobs):
    for stub in (relay, jobs):
        error = await refused(stub.SetEndpoints(rented(rig, 1, rig.workers.url("rented")), timeout=30))
        assert error.reason is Reason.FORBIDDEN


async def test_an_endpoint_is_drained_and_put_back(rig, relay, admin):
    drained = relay_pb2.DrainEndpointRequest(upstream="stt", address=rig.workers.url("stt"), drain=True, wait_ms=2000)
    assert (await admin.DrainEndpoint(drained, timeout=30)).active_requests == 0
    assert (await upstreams(relay))["stt"].groups[0].endpoints[0].health == relay_pb2.ENDPOINT_HEALTH_DRAINING
    assert rig.ask("/v1/audio/transcriptions").json()["worker"] == "managed"
    back = relay_pb2.DrainEndpointRequest(upstream="stt", address=rig.workers.url("stt"), drain=False)
    await admin.DrainEndpoint(back, timeout=30)
    assert rig.ask("/v1/audio/transcriptions").json()["worker"] == "stt"
    error = await refused(admin.DrainEndpoint(relay_pb2.DrainEndpointRequest(upstream="stt", address="http://x:1")))
    assert error.reason is Reason.NOT_FOUND


async def test_draining_waits_for_what_runs_and_ends_nothing(rig, admin):
    mark = new_mark()
    holding = asyncio.create_task(asyncio.to_thread(rig.speak, "hold", **{"x-mark": mark}))
    await asyncio.to_thread(rig.workers.one, mark)
    address = rig.workers.url("tts")
    at_once = relay_pb2.DrainEndpointRequest(upstream="tts", address=address, drain=True)
    assert (await admin.DrainEndpoint(at_once, timeout=30)).active_requests == 1
    patient = relay_pb2.DrainEndpointRequest(upstream="tts", address=address, drain=True, wait_ms=30_000)
    waiting = asyncio.ensure_future(admin.DrainEndpoint(patient, timeout=60))
    rig.workers.release(mark)
    assert (await holding).status_code == 200
    assert (await waiting).active_requests == 0
    await admin.DrainEndpoint(relay_pb2.DrainEndpointRequest(upstream="tts", address=address), timeout=30)


async def test_a_worker_whose_device_lacks_memory_is_passed_over_until_it_has_some(rig, relay, admin, wait_until):
    own = f"endpoints: [{rig.workers.url('stt')}]"
    # One attempt: a worker that is only busy, since the last exchange has not quite ended, is tried first.
    passed_over = ("managed", "1")

    def asked() -> tuple[str, str]:
        answer = rig.ask("/v1/audio/transcriptions")
        return answer.json()["worker"], answer.headers["x-omniserve-asr-attempts"]

    rig.config.write_text(rig.settings().replace(own, f"local: {{{own}, min_free_mib: 99999999}}"))
    await admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30)
    try:
        await asyncio.to_thread(wait_until, lambda: asked() == passed_over, "the worker is passed over")
    finally:
        rig.config.write_text(rig.settings())
        await admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30)
    await asyncio.to_thread(wait_until, lambda: asked()[0] == "stt", "the worker is back")


# ---- settings -----------------------------------------------------------------------------------------------------


async def test_settings_are_read_again_and_an_unchanged_file_changes_nothing(rig, relay, admin):
    assert not (await admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30)).changed
    rig.config.write_text(rig.settings() + f"  animation: {{endpoints: ['{rig.workers.url('rented')}']}}\n")
    await admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30)
    assert "animation" in await upstreams(relay)
    assert not (await admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30)).changed


async def test_bad_settings_are_refused_with_their_line_and_the_running_ones_stay(rig, relay, admin):
    before = (await relay.GetStatus(relay_pb2.GetStatusRequest())).config_version
    rig.config.write_text(rig.settings().replace("max_body_mib", "max_body_mb"))
    error = await refused(admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30))
    assert error.reason is Reason.INVALID_REQUEST
    assert error.field == "upstreams.tts.max_body_mb"
    assert "omniserve.yaml:4: upstreams.tts.max_body_mb: no such setting; did you mean `max_body_mib`?" in error.message
    found = await relay.GetStatus(relay_pb2.GetStatusRequest())
    assert found.config_version == before
    assert [(each.line, each.setting) for each in found.problems] == [(4, "upstreams.tts.max_body_mb")]
    assert await asyncio.to_thread(ready, rig)


async def test_settings_are_checked_without_being_applied(rig, relay, admin):
    before = (await relay.GetStatus(relay_pb2.GetStatusRequest())).config_version
    assert not (await admin.CheckConfig(relay_pb2.CheckConfigRequest(), timeout=30)).problems
    good = "upstreams: {animation: {endpoints: [http://127.0.0.1:1]}}\n"
    assert not (await admin.CheckConfig(relay_pb2.CheckConfigRequest(yaml=good), timeout=30)).problems
    (problem,) = (await admin.CheckConfig(relay_pb2.CheckConfigRequest(yaml="keys: []\nroute: {}\n"))).problems
    assert (problem.line, problem.setting) == (2, "route")
    assert problem.message == "no such section; did you mean `routes`?"
    assert (await relay.GetStatus(relay_pb2.GetStatusRequest())).config_version == before


async def test_the_admin_service_is_the_operators_alone(rig, jobs):
    async with rig.channel("llm") as channel:
        stub = relay_pb2_grpc.RelayServiceStub(channel)
        await stub.GetStatus(relay_pb2.GetStatusRequest(), timeout=30)
    plain = grpc.aio.insecure_channel(rig.environ["OMNISERVE_RELAY_LISTEN"])
    async with plain:
        error = await refused(
            relay_pb2_grpc.RelayServiceStub(plain).GetStatus(relay_pb2.GetStatusRequest(), timeout=30)
        )
    assert error.reason is Reason.UNAUTHENTICATED


# ---- Forward ------------------------------------------------------------------------------------------------------


def head(route="tts.speech", headers=(), **more):
    named = [relay_pb2.Header(name=name, value=value) for name, value in headers]
    return relay_pb2.ForwardRequest(head=relay_pb2.ForwardHead(route_id=route, headers=named, **more))


async def forward(stub, first, *pieces):
    """Send a whole request; return the answer's head, body and end."""
    call = stub.Forward(iter([first, *(relay_pb2.ForwardRequest(body=piece) for piece in pieces)]), timeout=60)
    events = [event async for event in call]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "head", kinds
    assert kinds[-1] == "end", kinds
    body = b"".join(event.body for event in events if event.HasField("body"))
    assert events[-1].end.body_bytes == len(body)
    return events[0].head, body


async def test_a_forwarded_request_reaches_the_worker_under_a_permit_byte_for_byte(rig, jobs):
    mark = new_mark()
    sent = os.urandom(300_000)
    first = head(
        headers=[("x-do", "echo"), ("x-mark", mark), ("content-type", "application/octet-stream")],
        query="voice=calm",
        tier=admission_pb2.TIER_SUB,
        request_id="job-1",
    )
    answer, body = await forward(jobs, first, sent[:100_000], sent[100_000:])
    assert answer.status == 200
    assert body == sent
    seen = rig.workers.one(mark)
    assert (seen.method, seen.target, seen.received) == ("POST", "/v1/audio/speech?voice=calm", 300_000)
    assert seen.header("x-request-id") == ["job-1"]
    assert seen.header("x-omniserve-internal") == ["local"]
    assert not [
        name for name in seen.names() if name.startswith(("x-omniserve-", "x-om-")) and not name.endswith("-internal")
    ]
    token = (rig.state_dir / "tokens" / "relay").read_text().strip()
    assert token not in str(seen.headers)


@pytest.mark.parametrize("code", [200, 404, 422, 429, 500, 503])
async def test_whatever_a_worker_answers_is_passed_on(rig, jobs, code):
    answer, _ = await forward(jobs, head("forecast.forecasts", headers=[("x-do", f"status?code={code}")]), b"{}")
    assert answer.status == code
    assert (answer.group, answer.attempts) == (LOCAL, 1)


async def test_an_answer_from_the_other_group_says_so(rig, jobs):
    first = head("stt.transcriptions", headers=[("x-do-stt", "status?code=503"), ("x-do-managed", "json")])
    answer, body = await forward(jobs, first, b"{}")
    assert json.loads(body)["worker"] == "managed", answer
    assert (answer.group, answer.attempts) == (OVERFLOW, 2), answer


async def test_a_broken_answer_has_no_end(rig, jobs):
    first = head("forecast.forecasts", headers=[("x-do", "die?after=1")])
    events = aiter(jobs.Forward(iter([first]), timeout=60))
    assert (await anext(events)).head.status == 200
    error = await refused(read_out(events))
    assert error.reason is Reason.UPSTREAM_FAILED


async def read_out(events):
    """Read everything that is left, in which there must be no end."""
    async for event in events:
        assert not event.HasField("end")


@pytest.mark.parametrize(
    ("first", "pieces", "reason", "field"),
    [
        (head("tts.speach"), (), Reason.NOT_FOUND, "head.route_id"),
        (head("animation.generations"), (), Reason.NOT_FOUND, "head.route_id"),
        (head("llm.chat"), (), Reason.NOT_FOUND, "head.route_id"),
        (head(headers=[("authorization", "Bearer x")]), (), Reason.INVALID_REQUEST, "head.headers"),
        (head(headers=[("x-omniserve-tier", "paid")]), (), Reason.INVALID_REQUEST, "head.headers"),
        (head(path_rest="../admin"), (), Reason.INVALID_REQUEST, "head.path_rest"),
        (head(body_bytes=3 * 1024 * 1024), (), Reason.TOO_LARGE, "body"),
        (head(), (b"x" * 1024 * 1024,) * 3, Reason.TOO_LARGE, "body"),
        (head(), (b"x" * (1024 * 1024 + 1),), Reason.INVALID_REQUEST, "body"),
        (head(body_bytes=10), (b"12345",), Reason.INVALID_REQUEST, "head.body_bytes"),
        (head(body_bytes=2), (b"12345",), Reason.INVALID_REQUEST, "head.body_bytes"),
        (relay_pb2.ForwardRequest(body=b"x"), (), Reason.INVALID_REQUEST, "head"),
        (head(tier=99), (), Reason.INVALID_REQUEST, "head.tier"),
        (head(principal="a b"), (), Reason.INVALID_REQUEST, "head.principal"),
    ],
)
async def test_a_request_that_cannot_be_forwarded_is_refused_by_reason(jobs, first, pieces, reason, field):
    call = jobs.Forward(iter([first, *(relay_pb2.ForwardRequest(body=piece) for piece in pieces)]), timeout=60)
    error = await refused(read_out(call))
    assert (error.reason, error.field) == (reason, field)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text, _: f"{text}routes: {{forecast.forecasts: {{paying_tiers: [paid]}}}}\n", Reason.PAYMENT_REQUIRED),
        (lambda text, worker: text.replace(worker, "http://127.0.0.1:1"), Reason.NO_CAPACITY),
    ],
)
async def test_what_the_mesh_itself_refuses_is_an_error_by_its_reason(rig, admin, jobs, change, reason):
    rig.config.write_text(change(rig.settings(), rig.workers.url("forecast")))
    await admin.ReloadConfig(relay_pb2.ReloadConfigRequest(), timeout=30)
    await asyncio.sleep(0.2)  # Envoy takes files within some 10 ms
    call = jobs.Forward(iter([head("forecast.forecasts"), relay_pb2.ForwardRequest(body=b"{}")]), timeout=60)
    assert (await refused(read_out(aiter(call)))).reason is reason


async def test_leaving_a_forwarded_request_frees_its_permit(rig, jobs, wait_until):
    mark = new_mark()
    call = jobs.Forward(iter([head("forecast.forecasts", headers=[("x-do", "hold"), ("x-mark", mark)])]), timeout=60)
    reading = asyncio.create_task(call.read())
    await asyncio.to_thread(rig.workers.one, mark)
    call.cancel()
    await asyncio.wait([reading])
    assert await asyncio.to_thread(ready, rig)  # the only slot is free again
    await asyncio.to_thread(wait_until, lambda: rig.workers.one(mark).outcome == "gone", "the worker is left")


async def test_a_forwarded_request_waits_its_turn_in_the_same_line(rig, jobs):
    mark, other = new_mark(), new_mark()
    holding = asyncio.create_task(asyncio.to_thread(rig.speak, "hold", **{"x-mark": mark}))
    await asyncio.to_thread(rig.workers.one, mark)
    first = head("forecast.forecasts", headers=[("x-do", "json"), ("x-mark", other)])
    waiting = asyncio.create_task(forward(jobs, first, b"{}"))
    async with asyncio.timeout(30):
        while await rig.waiting() != 1:
            await asyncio.sleep(0.05)
    assert rig.workers.seen(mark=other) == []
    rig.workers.release(mark)
    answer, _ = await waiting
    assert answer.status == 200
    await holding


async def test_a_forwarded_request_that_may_not_wait_is_refused_while_the_device_is_taken(rig, relay, jobs):
    mark = new_mark()
    holding = asyncio.create_task(asyncio.to_thread(rig.speak, "hold", **{"x-mark": mark}))
    await asyncio.to_thread(rig.workers.one, mark)
    before = (await status(relay, "tts")).overflow_total
    for route in ("forecast.forecasts", "tts.speech"):
        first = head(route, headers=[("x-do", "json")], may_wait=False)
        error = await refused(
            read_out(aiter(jobs.Forward(iter([first, relay_pb2.ForwardRequest(body=b"{}")]), timeout=60)))
        )
        assert error.reason is Reason.SATURATED
        assert error.retry_after_ms >= 1_000
    assert await rig.waiting() == 0
    assert (await status(relay, "tts")).overflow_total == before, "nobody went elsewhere"
    rig.workers.release(mark)
    await holding
    await rig.idle()
    answer, _ = await forward(jobs, head("forecast.forecasts", headers=[("x-do", "json")], may_wait=False), b"{}")
    assert answer.status == 200


@pytest.mark.parametrize(
    ("caller", "principal", "metadata", "booked"),
    [
        ("jobs", "alice", (), ("alice", "sub")),
        ("facade", "", (("x-omniserve-client", "bob"), ("x-omniserve-tier", "paid")), ("bob", "sub")),
        ("llm", "alice", (("x-omniserve-client", "bob"),), ("llm", "sub")),
    ],
)
async def test_a_permit_is_booked_for_whom_the_caller_may_speak_for(rig, caller, principal, metadata, booked):
    request_id = new_mark()
    asked = {"headers": [("x-do", "json")], "principal": principal, "tier": admission_pb2.TIER_SUB}
    async with rig.channel(caller) as channel:
        call = relay_pb2_grpc.RelayServiceStub(channel).Forward(
            iter([head("forecast.forecasts", request_id=request_id, **asked), relay_pb2.ForwardRequest(body=b"{}")]),
            timeout=60,
            metadata=metadata,
        )
        assert [event.WhichOneof("event") async for event in call][-1] == "end"
    line = await asyncio.to_thread(rig.logged, request_id)
    assert (line["listener"], line["client"], line["tier"]) == ("mesh", *booked)


async def test_without_a_tier_of_its_own_a_forwarded_request_has_its_callers(rig):
    request_id = new_mark()
    first = head("forecast.forecasts", headers=[("x-do", "json")], request_id=request_id)
    async with rig.channel("facade") as channel:
        stub = relay_pb2_grpc.RelayServiceStub(channel)
        metadata = (("x-omniserve-client", "bob"), ("x-omniserve-tier", "paid"))
        call = stub.Forward(iter([first, relay_pb2.ForwardRequest(body=b"{}")]), timeout=60, metadata=metadata)
        assert [event.WhichOneof("event") async for event in call][-1] == "end"
    assert (await asyncio.to_thread(rig.logged, request_id))["tier"] == "paid"


async def test_a_process_without_a_token_cannot_forward(rig):
    async with grpc.aio.insecure_channel(rig.environ["OMNISERVE_RELAY_LISTEN"]) as plain:
        call = relay_pb2_grpc.RelayServiceStub(plain).Forward(iter([head()]), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert from_rpc_error(caught.value).reason is Reason.UNAUTHENTICATED


# ---- the command line ---------------------------------------------------------------------------------------------


def test_the_command_line_shows_where_requests_go(rig):
    url = f"http://127.0.0.1:{rig.environ['OMNISERVE_EDGE_OPERATOR_PORT']}"
    command = [sys.executable, "-c", "from cli.main import main; main()", "upstreams", "--url", url]
    shown = subprocess.run(command, cwd=ROOT, env=rig.environ, capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert rig.workers.url("tts") in shown.stdout
    assert "remotes-own-key" not in shown.stdout
    told = subprocess.run([*command, "--json"], cwd=ROOT, env=rig.environ, capture_output=True, timeout=60, check=True)
    assert {each["name"] for each in json.loads(told.stdout)["upstreams"]} == {"forecast", "stt", "tts"}
