"""API keys: made and revoked while the mesh runs, shown in any of five places, seen by nobody else."""

import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from tests.fixtures.collector import collector
from tests.fixtures.proxied import LIMIT_S, proxied_mesh
from tests.fixtures.raw import http1, request_bytes
from tests.fixtures.workers import new_mark

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SPEECH = "/v1/audio/speech"
VIDEO = "/v1/video/generations"


@pytest.fixture(scope="module")
def traced():
    with collector() as (sink, endpoint):
        yield sink, endpoint


@pytest.fixture(scope="module")
def proxied(tmp_path_factory, make_mesh, free_ports, wait_until, traced):
    upstreams = {"OMNISERVE_TTS_UPSTREAM": "tts", "OMNISERVE_H3_UPSTREAM": "h3"}
    settings = {"OMNISERVE_ALLOW_ANONYMOUS": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": traced[1]}
    folder = tmp_path_factory.mktemp("keys")
    with proxied_mesh(folder, make_mesh, free_ports, wait_until, upstreams, chats=False, **settings) as running:
        yield running


def omniserve(proxied, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=ROOT,
        env=dict(proxied.mesh.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def make_key(proxied):
    """Return make_key(name, tier): a new key's text, made with the command line."""

    def make(name, tier):
        output = omniserve(proxied, "keys", "create", name, "--tier", tier)
        (text,) = [word for word in output.split() if word.startswith("om-")]
        return text

    return make


@pytest.fixture(scope="module")
def paid(make_key, proxied):
    text = make_key("payer", "paid")
    proxied.wait_until(lambda: status(proxied, text) == 200, "a new key works")
    return text


def status(proxied, key, path=SPEECH):
    return proxied.ask(path, "json", headers={"x-api-key": key}).status_code


def test_a_new_key_works_at_once_and_its_text_is_kept_nowhere(proxied, make_key):
    text = make_key("fresh", "sub")
    assert len(text) == 46
    proxied.wait_until(lambda: status(proxied, text) == 200, "the key works")
    kept = proxied.mesh.state_dir / "keys.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert text not in kept.read_text()
    listed = omniserve(proxied, "keys", "list")
    assert "fresh" in listed
    assert text not in listed


def test_a_revoked_key_is_refused_while_others_go_on(proxied, make_key, paid):
    text = make_key("leaver", "paid")
    proxied.wait_until(lambda: status(proxied, text) == 200, "the key works")
    omniserve(proxied, "keys", "revoke", "leaver")
    proxied.wait_until(lambda: status(proxied, text) == 401, "the key is refused")
    answer = proxied.ask(SPEECH, "json", headers={"x-api-key": text})
    assert answer.json()["error"]["code"] == "unauthenticated"
    assert status(proxied, paid) == 200


def test_a_wrong_key_is_refused_even_where_nobody_needs_one(proxied, paid):
    assert proxied.ask(SPEECH, "json").status_code == 200
    mark = new_mark()
    answer = proxied.ask(SPEECH, "json", mark=mark, headers={"authorization": f"Bearer {paid}x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
    assert proxied.workers.seen(mark=mark) == []


def test_a_key_may_be_in_any_of_five_places(proxied, paid):
    places = [
        {"authorization": f"Bearer {paid}"},
        {"Authorization": f"bearer {paid}"},
        {"AUTHORIZATION": f"BEARER  {paid}"},
        {"X-API-Key": paid},
        {"x-rapid-api-key": paid},
        {"Secret": paid},
    ]
    for place in places:
        assert proxied.ask(VIDEO, "json", headers=place).status_code == 200, place
    for query in (f"?secret={paid}", f"?a=1&secret={paid}&b=2"):
        assert proxied.ask(VIDEO + query, "json").status_code == 200
    assert proxied.ask(VIDEO, "json").status_code == 402


def test_a_tier_is_capped_by_the_key_and_never_raised(proxied, make_key, paid):
    sub = make_key("subscriber", "sub")
    proxied.wait_until(lambda: status(proxied, sub) == 200, "the key works")
    tiers = {}
    for name, key, asked in (
        ("up", sub, "paid"),
        ("own", sub, None),
        ("down", paid, "background"),
        ("none", None, "paid"),
    ):
        headers = {"x-api-key": key} if key else {}
        answer = proxied.ask(SPEECH, "json", tier=asked, headers=headers)
        assert answer.status_code == 200
        tiers[name] = answer.headers["x-request-id"]
    log = proxied.mesh.state_dir / "logs" / "access.log"
    proxied.wait_until(lambda: all(mark in log.read_text() for mark in tiers.values()), "the access log")
    lines = {name: next(line for line in log.read_text().splitlines() if mark in line) for name, mark in tiers.items()}
    expected = {"up": "sub", "own": "sub", "down": "background", "none": "free"}
    assert {
        name: next(tier for tier in ("paid", "sub", "free", "background") if f'"tier":"{tier}"' in line)
        for name, line in lines.items()
    } == expected
    assert '"client":"subscriber"' in lines["up"]


def test_an_unknown_tier_is_an_error_that_names_the_known_ones(proxied, paid):
    answer = proxied.ask(SPEECH, "json", tier="platinum", headers={"x-api-key": paid})
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]


def test_a_key_in_the_query_is_seen_by_nobody(proxied, paid, traced):
    sink, _ = traced
    trace, mark = "4bf92f3577b34da6a3ce929d0e0e4736", new_mark()
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    queries = [f"?secret={paid}", f"?z=a%20b&secret={paid}&b=&a&x=1&z=%2F", f"?secret=&secret={paid}"]
    for query in queries:
        proxied.ask(SPEECH + query, "json", mark=mark, headers=headers)
    proxied.ask(f"{SPEECH}?secret=wrong-{paid}", "json", mark=mark, headers=headers)
    proxied.wait_until(lambda: any(span.trace_id.hex() == trace for span in sink.spans), "the trace")
    seen = proxied.workers.seen(mark=mark)
    assert seen
    assert {each.query for each in seen} == {"", "z=a%20b&b=&a&x=1&z=%2F"}
    assert paid not in str(seen)
    assert paid not in str(sink.spans)
    for log in (proxied.mesh.state_dir / "logs").iterdir():
        assert paid not in log.read_text(errors="replace"), log.name
    assert paid not in proxied.mesh.output.read_text()


def test_two_keys_are_no_key(proxied, paid):
    mark = new_mark()
    headers = [("x-api-key", paid), ("X-API-Key", "om-another"), ("x-do", "json"), ("x-mark", mark)]
    answer = http1(proxied.mesh.public_target, request_bytes(f"POST {SPEECH}", headers, b"{}"))
    assert answer.status in {200, 400, 401}
    assert answer.status == 401 or "om-another" not in str(proxied.workers.seen(mark=mark))


def test_native_grpc_takes_the_same_keys(proxied, paid):
    with grpc.insecure_channel(proxied.mesh.public_target) as channel:
        stub = llm_pb2_grpc.LlmServiceStub(channel)
        assert stub.ListModels(llm_pb2.ListModelsRequest(), timeout=30, metadata=(("x-api-key", paid),)).models
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListModels(llm_pb2.ListModelsRequest(), timeout=30, metadata=(("authorization", "Bearer wrong"),))
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_the_last_revoked_key_does_not_open_the_door_again(proxied, make_key):
    """Tiers stay capped for people without a key: somebody has made keys here, so the box is not one person's any more."""
    make_key("brief", "free")
    omniserve(proxied, "keys", "revoke", "brief")
    assert proxied.ask(VIDEO, "json", tier="paid").status_code == 402


def test_a_key_made_by_hand_in_the_file_needs_its_hash_only(proxied):
    answer = httpx.get(f"{proxied.mesh.public_url}/v1/models", headers={"x-api-key": "om-unknown"}, timeout=LIMIT_S)
    assert answer.status_code == 200, "a route that needs no key looks at none"


def test_a_signed_url_needs_no_key_but_a_key_that_is_shown_is_checked(proxied, paid):
    url = f"{proxied.mesh.public_url}/v1/images/files/abc?expires=9999999999999&signature=x"
    assert httpx.get(url, timeout=LIMIT_S).status_code == 404
    assert httpx.get(url, headers={"x-api-key": paid}, timeout=LIMIT_S).status_code == 404
    assert httpx.get(url, headers={"x-api-key": "om-wrong"}, timeout=LIMIT_S).status_code == 401
    assert httpx.get(f"{url}&secret=om-wrong", timeout=LIMIT_S).status_code == 401
