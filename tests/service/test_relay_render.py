"""Real Envoy's word on what relay renders, and a real relay that follows its files."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml

from deploy import edge
from deploy.edge_settings import EdgeSettings
from omniserve.relay.v1 import relay_pb2, relay_pb2_grpc
from services.kit.channels import open_channel
from services.kit.tokens import ensure_token
from services.relay.adapters.door import DoorError, read_door
from services.relay.adapters.former import FormerInputs
from services.relay.adapters.judge import JudgeError, refusal_of
from services.relay.adapters.xds_files import XdsFiles
from services.relay.core.model import (
    ANY_5XX,
    Credential,
    Endpoint,
    Group,
    GroupKind,
    RelayInputs,
    RouteOverride,
    Upstream,
)
from services.relay.core.render import render
from services.relay.core.render_whole import whole

ROOT = Path(__file__).resolve().parents[2]
ENVOY = str(Path(sys.executable).with_name("envoy"))

HERE = Endpoint("http", "127.0.0.1", 9001)
LOCAL = Group(GroupKind.LOCAL, (HERE,), replay_statuses=ANY_5XX)
SEVERAL = Group(
    GroupKind.LOCAL, (HERE, Endpoint("http", "10.1.2.3", 80, weight=3), Endpoint("http", "::1", 9, draining=True))
)
NAMED = Group(GroupKind.LOCAL, (Endpoint("http", "worker", 8080, path_prefix="/v2/model"),))
REMOTE = Group(
    GroupKind.OVERFLOW,
    (Endpoint("https", "api.example.com", 443),),
    tiers=frozenset({"paid"}),
    replay_statuses=ANY_5XX,
    credential=Credential("authorization", "Bearer 100% %REQ(x)%"),
)
REMOTES = Group(
    GroupKind.OVERFLOW,
    (
        Endpoint("https", "a.example.com", 443, path_prefix="/v1"),
        Endpoint("https", "b.example.com", 8443, path_prefix="/v1"),
    ),
)
MANAGED = Group(
    GroupKind.MANAGED, (Endpoint("https", "10.0.0.7", 443, execution_tier="pod"),), tiers=frozenset({"paid", "sub"})
)

CONFIGURATIONS = {
    "nothing": {},
    "a worker": {"tts": (LOCAL,)},
    "several endpoints": {"tts": (SEVERAL,), "default": (NAMED,)},
    "an overflow": {"tts": (LOCAL, REMOTE), "stt": (replace(LOCAL, replay_statuses=frozenset({429, 503})), REMOTES)},
    "managed": {"h3": (MANAGED,)},
    "remote only": {"tts": (REMOTE,)},
}


@pytest.fixture
def door(tmp_path):
    edge.write(EdgeSettings(state_dir=tmp_path, envoy=ENVOY))
    return read_door(tmp_path)


def rendered(door, groups, **inputs):
    upstreams = {
        name: Upstream(name, name if name != "h3" else "video", each, health_path="/health")
        for name, each in groups.items()
    }
    return render(RelayInputs(upstreams, **inputs), door.facts, xds_dir="/xds")


@pytest.mark.parametrize("name", CONFIGURATIONS)
async def test_envoy_takes_what_is_rendered(door, name):
    result = rendered(door, CONFIGURATIONS[name], authenticate_public=name != "nothing", authenticate_operator=True)
    assert await refusal_of(ENVOY, whole(door.static, result)) is None


async def test_envoy_takes_every_route_gated_and_ungated_with_overrides(door):
    every = dict.fromkeys(("llm", "image", "image_worker", "birefnet", "tts", "stt", "forecast", "embedding"), (LOCAL,))
    every |= dict.fromkeys(("multimodal", "animation", "three_d", "training", "default"), (LOCAL, REMOTE))
    override = RouteOverride(upstream_path="/other", timeout_ms=1500, added_headers={"x-lab": "100%"})
    result = rendered(door, every, overrides={"tts.speech": override, "llm.engine_completions": override})
    free = replace(result.plan[0].proxied.upstream, permits=0)
    assert await refusal_of(ENVOY, whole(door.static, result)) is None
    ungated = render(RelayInputs({"llm": free}), door.facts, xds_dir="/xds")
    assert await refusal_of(ENVOY, whole(door.static, ungated)) is None


@pytest.mark.parametrize(
    ("groups", "inputs", "words"),
    [
        ({"tts": (replace(LOCAL, endpoints=(Endpoint("http", "127.0.0.1", 70_000),)),)}, {}, "port"),
        ({"tts": (replace(REMOTE, ca="/nowhere/ca.crt"),)}, {}, "/nowhere/ca.crt"),
        ({"tts": (replace(LOCAL, endpoints=(replace(HERE, weight=0),)),)}, {}, "weight"),
        (
            {"tts": (LOCAL,)},
            {"overrides": {"tts.speech": RouteOverride(added_headers={":path": "/admin"})}},
            "modified",
        ),
    ],
)
async def test_what_envoy_would_refuse_is_refused_before_it_goes_live(door, groups, inputs, words):
    refused = await refusal_of(ENVOY, whole(door.static, rendered(door, groups, **inputs)))
    assert refused is not None
    assert words.lower() in refused.lower()
    assert "{" not in refused


async def test_a_refusal_never_repeats_a_credential(door):
    group = replace(REMOTE, endpoints=(replace(REMOTE.endpoints[0], weight=0),))
    refused = await refusal_of(ENVOY, whole(door.static, rendered(door, {"tts": (LOCAL, group)})))
    assert "Weight" in (refused or "")
    assert "Bearer" not in (refused or "")


async def test_a_route_into_nowhere_is_refused(door):
    result = rendered(door, {"tts": (LOCAL,)})
    refused = await refusal_of(ENVOY, whole(door.static, replace(result, clusters=[])))
    assert "tts.local.e0" in (refused or "")


async def test_an_envoy_that_is_not_there_is_told_by_its_setting(door):
    with pytest.raises(JudgeError, match="OMNISERVE_EDGE_ENVOY"):
        await refusal_of("/nowhere/envoy", door.static)


def test_without_the_static_half_relay_says_who_writes_it(tmp_path):
    with pytest.raises(DoorError, match=r"deploy\.edge"):
        read_door(tmp_path)


# ---- files --------------------------------------------------------------------------------------------------------


def clusters_in(folder):
    return [each["name"] for each in yaml.safe_load((folder / "cds.yaml").read_text())["resources"]]


async def test_files_are_their_owners_only_and_untouched_when_they_say_the_same(door, tmp_path):
    folder = tmp_path / "xds"
    result = rendered(door, CONFIGURATIONS["an overflow"])
    await XdsFiles(folder).put(result)
    files = {path.name: path.stat() for path in folder.iterdir()}
    assert set(files) == {
        "cds.yaml",
        "eds.tts.local.yaml",
        "eds.stt.local.yaml",
        *(f"rds.{name}.yaml" for name in result.routes),
    }
    assert {stat.st_mode & 0o777 for stat in files.values()} == {0o600}
    await XdsFiles(folder).put(result)
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == {name: s.st_ino for name, s in files.items()}


async def test_a_cluster_leaves_after_the_routes_that_led_there_also_when_a_former_process_wrote_it(door, tmp_path):
    folder = tmp_path / "xds"
    await XdsFiles(folder).put(rendered(door, {"tts": (LOCAL,)}))
    order = []
    files = XdsFiles(folder)
    write = files._write
    files._write = lambda name, kind, resources: (
        order.append((name, [each.get("name") for each in resources])),
        write(name, kind, resources),
    )
    await files.put(rendered(door, {"stt": (LOCAL,)}))
    both = ["stt.local.e0", "stt.local.e1", "tts.local.e0", "tts.local.e1"]
    assert [name for name, _ in order] == [
        "eds.stt.local.yaml",
        "cds.yaml",
        *(f"rds.{n}.yaml" for n in ("gate", "public", "operator", "mesh")),
        "cds.yaml",
    ]
    assert (order[1][1], order[-1][1]) == (both, both[:2])
    assert not (folder / "eds.tts.local.yaml").exists()


# ---- the process --------------------------------------------------------------------------------------------------


KEY = {"name": "ci", "sha256": "0" * 64, "tier": "sub", "created": 1.0, "expires": None, "revoked": None}


@contextmanager
def relay(state_dir, port, edge_settings=None, **settings):
    edge.write(EdgeSettings(state_dir=state_dir, envoy=ENVOY, **(edge_settings or {})))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))}
    environ = {
        "OMNISERVE_STATE_DIR": str(state_dir),
        "OMNISERVE_RELAY_LISTEN": f"127.0.0.1:{port}",
        "OMNISERVE_DRAIN_GRACE_S": "1",
        **settings,
    }
    log = state_dir / "relay.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.relay"], cwd=ROOT, env={**clean, **environ}, stdout=output, stderr=output
        )
    process.log = log
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def status(state_dir, port):
    ensure_token(state_dir, "cli")

    async def ask():
        async with open_channel(f"127.0.0.1:{port}", caller="cli", state_dir=state_dir) as channel:
            return await relay_pb2_grpc.RelayServiceStub(channel).GetStatus(relay_pb2.GetStatusRequest(), timeout=5)

    try:
        return asyncio.run(ask())
    except grpc.RpcError:
        return None


def upstreams_in(folder):
    try:
        return {name.split(".")[0] for name in clusters_in(folder)}
    except (OSError, TypeError):
        return None


def test_a_change_of_the_file_goes_live_a_bad_one_is_told_with_its_line_and_a_restart_changes_nothing(
    tmp_path, free_ports, wait_until
):
    (port,) = free_ports(1)
    folder, config = tmp_path / "xds", tmp_path / "omniserve.yaml"
    config.write_text("upstreams:\n  tts: {endpoints: ['http://127.0.0.1:9001']}\n")
    with relay(tmp_path, port, OMNISERVE_CONFIG=str(config)) as process:
        wait_until(lambda: status(tmp_path, port), "relay serves")
        assert upstreams_in(folder) == {"tts"}

        config.write_text("upstreams:\n  stt: {endpoints: ['http://127.0.0.1:9001']}\n")
        wait_until(lambda: upstreams_in(folder) == {"stt"}, "the change is live, what is not needed any more is gone")
        good = (folder / "rds.public.yaml").read_text()

        config.write_text("upstreams:\n  stt: {endpoints: ['http://127.0.0.1:9001']}\n  tss: {}\n")
        wait_until(lambda: status(tmp_path, port).problems, "the fault is told")
        (problem,) = status(tmp_path, port).problems
        assert (problem.file, problem.line) == (str(config), 3)
        assert "tts" in problem.message
        assert (folder / "rds.public.yaml").read_text() == good

        config.write_text("upstreams:\n  stt: {endpoints: ['http://127.0.0.1:9001']}\n")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: not status(tmp_path, port).problems, "it is mended")
        inodes = {path.name: path.stat().st_ino for path in folder.iterdir()}
    with relay(tmp_path, port, OMNISERVE_CONFIG=str(config)):
        wait_until(lambda: status(tmp_path, port), "relay serves again")
        assert {path.name: path.stat().st_ino for path in folder.iterdir()} == inodes


def test_the_first_key_closes_the_public_listener(tmp_path, free_ports, wait_until):
    (port,) = free_ports(1)
    public = tmp_path / "xds" / "rds.public.yaml"
    with relay(tmp_path, port):
        wait_until(public.exists, "relay has written its files")
        assert "listener: public" not in public.read_text()
        (tmp_path / "keys.json").write_text(json.dumps({"keys": [KEY]}))
        wait_until(lambda: "listener: public" in public.read_text(), "callers are checked")


BAD_AUTHORITY = "upstreams:\n  tts:\n    local: {endpoints: ['https://10.0.0.1'], ca: ca.crt}\n"
ONE_WORKER = "upstreams:\n  tts: {endpoints: ['http://127.0.0.1:9001']}\n"
UNKNOWN_NAME = "# a comment\nupstreams:\n  tss: {endpoints: ['http://127.0.0.1:9001']}\n"


@pytest.mark.parametrize(
    "case",
    [
        (UNKNOWN_NAME, 3, "did you mean `tts`"),
        (BAD_AUTHORITY, None, "Envoy refuses the configuration"),
        ("a: [", 1, "no YAML"),
    ],
)
def test_a_start_with_a_bad_setting_goes_on_with_what_was_in_force_and_tells_the_line(
    tmp_path, free_ports, wait_until, case
):
    settings, line, words = case
    (port,) = free_ports(1)
    folder, config = tmp_path / "xds", tmp_path / "omniserve.yaml"
    (tmp_path / "ca.crt").write_text("no certificate")
    config.write_text(ONE_WORKER)
    with relay(tmp_path, port, OMNISERVE_CONFIG=str(config)):
        wait_until(lambda: status(tmp_path, port), "relay serves")
        version = status(tmp_path, port).config_version
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert (tmp_path / "relay.json").stat().st_mode & 0o777 == 0o600

    config.write_text(settings)
    with relay(tmp_path, port, OMNISERVE_CONFIG=str(config)) as process:
        wait_until(lambda: status(tmp_path, port), "relay serves all the same")
        told = status(tmp_path, port)
        assert told.config_version == version
        assert [each.name for each in told.upstreams] == ["tts"]
        assert [each.line or None for each in told.problems] == [line]
        assert words in told.problems[0].message
        assert {path.name: path.read_text() for path in folder.iterdir()} == before

        config.write_text("upstreams:\n  stt: {endpoints: ['http://127.0.0.1:9001']}\n")
        wait_until(lambda: upstreams_in(folder) == {"stt"}, "the mended settings are in force")
        wait_until(lambda: not status(tmp_path, port).problems, "and nothing is wrong any more")
    log = process.log.read_text()
    assert "settings refused; those before stay in force" in log
    assert words in log
    assert line is None or f"omniserve.yaml:{line}" in log


@pytest.mark.parametrize(
    ("settings", "words"), [(UNKNOWN_NAME, "did you mean `tts`"), (BAD_AUTHORITY, "Envoy refuses")]
)
def test_a_first_start_with_a_bad_setting_ends_with_a_sentence(tmp_path, free_ports, wait_until, settings, words):
    (port,) = free_ports(1)
    config = tmp_path / "omniserve.yaml"
    (tmp_path / "ca.crt").write_text("no certificate")
    config.write_text(settings)
    with relay(tmp_path, port, OMNISERVE_CONFIG=str(config)) as process:
        wait_until(lambda: process.poll() is not None, "relay ends")
    assert process.returncode == 2
    (sentence,) = [each for each in process.log.read_text().splitlines() if each.startswith("relay: ")]
    assert words in sentence
    assert not (tmp_path / "xds").exists()


def test_what_was_in_force_before_another_static_half_is_judged_anew(tmp_path, free_ports, wait_until):
    (port,) = free_ports(1)
    config, public = tmp_path / "omniserve.yaml", tmp_path / "xds" / "rds.public.yaml"
    config.write_text(ONE_WORKER)
    with relay(tmp_path, port, OMNISERVE_CONFIG=str(config)):
        wait_until(lambda: status(tmp_path, port), "relay serves")
    config.write_text(UNKNOWN_NAME)
    with relay(tmp_path, port, edge_settings={"body_limit_mib": 7}, OMNISERVE_CONFIG=str(config)):
        wait_until(lambda: status(tmp_path, port), "relay serves all the same")
        assert "7 MiB" in public.read_text()


def test_the_first_key_closes_the_public_listener_whatever_else_is_wrong(tmp_path, free_ports, wait_until):
    (port,) = free_ports(1)
    config, public = tmp_path / "omniserve.yaml", tmp_path / "xds" / "rds.public.yaml"
    config.write_text(ONE_WORKER)
    with relay(tmp_path, port, OMNISERVE_CONFIG=str(config)):
        wait_until(lambda: status(tmp_path, port), "relay serves")
        config.write_text(UNKNOWN_NAME)
        wait_until(lambda: status(tmp_path, port).problems, "the fault is told")
        assert "listener: public" not in public.read_text()
        (tmp_path / "keys.json").write_text(json.dumps({"keys": [KEY]}))
        wait_until(lambda: "listener: public" in public.read_text(), "callers are checked")


async def test_a_memory_that_cannot_be_read_is_none(tmp_path, door):
    former = FormerInputs(tmp_path / "relay.json")
    assert former.read() is None
    groups = CONFIGURATIONS["an overflow"] | CONFIGURATIONS["managed"]
    upstreams = {name: Upstream(name, name, each, permits=2) for name, each in groups.items()}
    override = RouteOverride(paying_tiers=frozenset({"sub"}), added_headers={"x-lab": "1"})
    inputs = RelayInputs(upstreams, {"OMNISERVE_TTS_PATH": "/x"}, {"tts.speech": override}, authenticate_public=True)
    former.write(inputs)
    assert former.read() == inputs
    (tmp_path / "relay.json").write_text('{"upstreams": 1}')
    assert former.read() is None
