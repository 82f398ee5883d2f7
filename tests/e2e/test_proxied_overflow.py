"""When the device is taken or the local worker fails before its first byte, those who may go to the remote do: once, whole."""

import hashlib
import json

import pytest

from services.diffusion.native.build import build as build_tap
from tests.fixtures.image_models import make
from tests.fixtures.proxied import LIMIT_S, proxied_mesh
from tests.fixtures.workers import new_mark

pytestmark = pytest.mark.e2e

SPEECH = "/v1/audio/speech"
IMAGE = "/v1/images/generations"
TRANSCRIPTION = "/v1/audio/transcriptions"
MIB = 1024 * 1024
BOTH = {"tts": "json", "remote": "json"}
PICTURE = json.dumps({"prompt": "a fox", "size": "64x64", "steps": 1, "seed": 7}).encode()


@pytest.fixture(scope="module")
def mesh_of_one(tmp_path_factory, make_mesh, free_ports, wait_until):
    upstreams = {
        "OMNISERVE_TTS_UPSTREAM": "tts",
        "OMNISERVE_TTS_OVERFLOW_UPSTREAM": "remote",
        "OMNISERVE_IMAGE_OVERFLOW_UPSTREAM": "painter",
        "OMNISERVE_STT_OVERFLOW_UPSTREAM": "remote",
        "OMNISERVE_FORECAST_UPSTREAM": "forecast",
    }
    settings = {
        "OMNISERVE_SLOTS": "1",
        "OMNISERVE_ADMISSION_TIMEOUT_S": "2",
        "OMNISERVE_TTS_OVERFLOW_API_KEY": "remotes-own-key",
        "OMNISERVE_STT_UPSTREAM": f"http://127.0.0.1:{free_ports(1)[0]}",
    }
    folder = tmp_path_factory.mktemp("overflow")
    settings |= {**make(folder / "model").settings, "OMNISERVE_DIFFUSION_NATIVE_TAP": str(build_tap())}
    with proxied_mesh(folder, make_mesh, free_ports, wait_until, upstreams, chats=False, **settings) as running:
        yield running


@pytest.fixture
def proxied(mesh_of_one):
    yield mesh_of_one
    for mark in mesh_of_one.workers.running():
        mesh_of_one.workers.release(mark)
    mesh_of_one.wait_idle()


@pytest.fixture
def saturated(proxied):
    """The only slot is taken."""
    mark = new_mark()
    answer = proxied.start(SPEECH, "hold", mark=mark)
    proxied.workers.one(mark)
    yield proxied
    proxied.workers.release(mark)
    assert answer.result(LIMIT_S).status_code == 200


def test_while_there_is_room_everybody_is_served_here(proxied):
    for tier in ("paid", "free"):
        assert proxied.ask(SPEECH, BOTH, tier=tier).json()["worker"] == "tts"
    assert proxied.workers.seen(worker="remote") == []


def test_a_paid_request_goes_to_the_remote_once_while_the_device_is_taken(saturated):
    mark = new_mark()
    answer = saturated.ask(SPEECH, BOTH, mark=mark, tier="paid")
    assert (answer.status_code, answer.json()["worker"]) == (200, "remote")
    assert saturated.workers.tried(mark) == ["remote"]
    assert not [name for name in answer.headers if name.startswith("x-omniserve-overflow")]


def test_the_remote_gets_its_own_credential_and_never_the_callers(saturated):
    mark = new_mark()
    callers = {
        "authorization": "Bearer callers",
        "x-api-key": "callers",
        "x-rapid-api-key": "callers",
        "secret": "callers",
    }
    saturated.ask(f"{SPEECH}?secret=callers&voice=v", BOTH, mark=mark, tier="paid", headers=callers)
    seen = saturated.workers.one(mark)
    assert seen.header("authorization") == ["Bearer remotes-own-key"]
    assert "callers" not in str(seen.headers) + seen.target
    assert not [name for name in seen.names() if name.startswith(("x-omniserve-", "x-om-", "x-envoy-"))]


def test_the_local_worker_never_sees_the_remotes_credential(proxied):
    mark = new_mark()
    proxied.ask(SPEECH, BOTH, mark=mark, tier="paid")
    assert "remotes-own-key" not in str(proxied.workers.one(mark).headers)


def test_other_tiers_wait_and_are_never_sent_to_the_remote(saturated):
    mark = new_mark()
    waiting = saturated.start(SPEECH, BOTH, mark=mark, tier="free")
    saturated.wait_waiting(1)
    answer = waiting.result(LIMIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "admission_timeout")
    assert "retry-after" in answer.headers
    assert saturated.workers.seen(mark=mark) == []


def test_a_caller_cannot_ask_for_the_remote(saturated):
    mark = new_mark()
    spoofed = {
        "x-omniserve-overflow": "saturated",
        "x-omniserve-ask": "route=tts;modality=tts;try",
        "x-envoy-retry-on": "5xx,retriable-4xx",
        "x-envoy-max-retries": "5",
    }
    assert saturated.ask(SPEECH, BOTH, mark=mark, tier="free", headers=spoofed).status_code == 429
    assert saturated.workers.seen(mark=mark) == []


def test_a_lane_without_a_remote_waits_at_every_tier(saturated):
    assert saturated.ask("/forecast", "json", tier="paid").status_code == 429


@pytest.mark.parametrize("do", ["reset", "status?code=500", "status?code=502", "status?code=503"])
def test_a_local_failure_before_the_first_byte_goes_to_the_remote_once(proxied, do):
    mark = new_mark()
    answer = proxied.ask(SPEECH, {"tts": do, "remote": "json"}, mark=mark, tier="paid")
    assert (answer.status_code, answer.json()["worker"]) == (200, "remote")
    assert proxied.workers.tried(mark) == ["tts", "remote"]


def test_the_permit_is_free_before_the_remote_is_asked(proxied):
    mark = new_mark()
    answer = proxied.start(SPEECH, {"tts": "status?code=500", "remote": "hold"}, mark=mark, tier="paid")
    proxied.wait_until(lambda: proxied.workers.tried(mark) == ["tts", "remote"], "the remote has it")
    assert proxied.left() == (0, 0, 0)
    assert proxied.ask(SPEECH, "json", tier="free").json()["worker"] == "tts"
    proxied.workers.release(mark)
    assert answer.result(LIMIT_S).json()["worker"] == "remote"


def test_a_remote_that_fails_too_is_the_answer(proxied):
    mark = new_mark()
    answer = proxied.ask(
        SPEECH, {"tts": "status?code=500", "remote": "status?code=503&h-retry-after=9"}, mark=mark, tier="paid"
    )
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
    assert proxied.workers.tried(mark) == ["tts", "remote"]


@pytest.mark.parametrize("code", [400, 401, 404, 409, 422, 429])
def test_what_the_worker_refuses_is_the_answer_and_not_replayed(proxied, code):
    mark = new_mark()
    do = f"status?code={code}&h-x-omniserve-overflow=saturated"
    answer = proxied.ask(SPEECH, {"tts": do, "remote": "json"}, mark=mark, tier="paid")
    assert (answer.status_code, answer.headers["x-worker"]) == (code, "tts")
    assert proxied.workers.tried(mark) == ["tts"]


@pytest.mark.parametrize("do", ["status?code=500", "reset"])
def test_a_failure_is_the_answer_for_tiers_without_a_remote(proxied, do):
    mark = new_mark()
    answer = proxied.ask(SPEECH, {"tts": do, "remote": "json"}, mark=mark, tier="free")
    assert answer.status_code >= 500
    assert proxied.workers.tried(mark) == ["tts"]


@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_stream_that_breaks_midway_is_never_started_again(proxied, how):
    mark = new_mark()
    orders = {"tts": f"die?after=2&how={how}", "remote": "sse?chunks=9"}
    received = proxied.read_until_broken(SPEECH, orders, mark=mark, tier="paid")
    assert received == b"".join(f"data: {mark} {number}\n\n".encode() for number in range(2))
    assert proxied.workers.tried(mark) == ["tts"]


@pytest.mark.parametrize("size", [3 * MIB, 80 * MIB])
def test_a_big_body_reaches_the_remote_whole(proxied, size):
    mark = new_mark()
    sent = hashlib.sha256(b"block").digest() * (size // 32)
    answer = proxied.ask(SPEECH, {"tts": "status?code=503", "remote": "json"}, mark=mark, tier="paid", content=sent)
    assert answer.json()["worker"] == "remote"
    assert [each.sha256 for each in proxied.workers.seen(mark=mark)] == [hashlib.sha256(sent).hexdigest()] * 2


def test_a_big_body_reaches_the_remote_whole_while_the_device_is_taken(saturated):
    mark = new_mark()
    sent = hashlib.sha256(b"block").digest() * (20 * MIB // 32)
    assert saturated.ask(SPEECH, BOTH, mark=mark, tier="paid", content=sent).json()["worker"] == "remote"
    assert saturated.workers.one(mark).sha256 == hashlib.sha256(sent).hexdigest()


def test_events_from_the_remote_arrive_as_they_are_written(saturated):
    mark = new_mark()
    with saturated.stream(
        SPEECH, {"tts": "json", "remote": "sse?chunks=2&hold_after=1"}, mark=mark, tier="paid"
    ) as answer:
        events = (line for line in answer.iter_lines() if line)
        assert next(events) == f"data: {mark} 0"
        saturated.workers.release(mark)
        assert list(events) == [f"data: {mark} 1", "data: [DONE]"]


def test_a_remote_without_a_key_gets_no_credential_at_all(proxied):
    mark = new_mark()
    callers = {"authorization": "Bearer callers", "x-api-key": "callers"}
    assert proxied.ask(TRANSCRIPTION, "json", mark=mark, tier="paid", headers=callers).json()["worker"] == "remote"
    assert not proxied.workers.one(mark).names() & {"authorization", "x-api-key"}


@pytest.fixture(scope="module")
def painting(mesh_of_one):
    """The mesh's own picture model is in memory."""
    answer = mesh_of_one.ask(IMAGE, "json", tier="paid", content=PICTURE)
    assert answer.json()["data"][0]["omniserve"]["seed"] == 7
    assert mesh_of_one.workers.seen(worker="painter") == []


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "streamed"])
def test_a_paid_picture_goes_to_the_remote_once_and_whole_while_the_device_is_taken(painting, saturated, more):
    mark, sent = new_mark(), json.dumps(json.loads(PICTURE) | more).encode()
    callers = {"authorization": "Bearer callers", "x-api-key": "callers"}
    answer = saturated.ask(IMAGE, {"painter": "json"}, mark=mark, tier="paid", content=sent, headers=callers)
    assert (answer.status_code, answer.json()["worker"]) == (200, "painter")
    assert not [name for name in answer.headers if name.startswith("x-omniserve-overflow")]
    seen = saturated.workers.one(mark)
    assert seen.sha256 == hashlib.sha256(sent).hexdigest()
    names = seen.names()
    assert not names & {"authorization", "x-api-key"}
    assert not [name for name in names if name.startswith(("x-omniserve-", "x-om-", "x-envoy-"))]


def test_other_tiers_wait_for_the_meshs_own_engine_whatever_they_say(painting, saturated):
    mark, spoofed = new_mark(), {"x-omniserve-mode": "try"}
    answer = saturated.ask(IMAGE, {"painter": "json"}, mark=mark, tier="free", content=PICTURE, headers=spoofed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "admission_timeout")
    assert saturated.workers.seen(mark=mark) == []


def test_what_the_meshs_own_engine_refuses_is_the_answer(painting, proxied):
    mark = new_mark()
    wrong = json.dumps(json.loads(PICTURE) | {"steps": 9999}).encode()
    assert proxied.ask(IMAGE, {"painter": "json"}, mark=mark, tier="paid", content=wrong).status_code == 400
    assert proxied.workers.seen(mark=mark) == []


def test_with_the_worker_dead_paid_goes_to_the_remote_and_free_gets_an_error(proxied):
    """Nobody listens where transcriptions should go; without the local-first setting their overflow is for payers."""
    assert proxied.ask(TRANSCRIPTION, "json", tier="paid").json()["worker"] == "remote"
    refused = proxied.ask(TRANSCRIPTION, "json", tier="free")
    assert refused.status_code in {502, 503}
    assert refused.json()["error"]["code"] in {"upstream_failed", "no_capacity"}
    proxied.wait_idle()


def test_overflows_are_counted_by_their_cause(proxied):
    before = proxied.overflows("tts")
    assert set(before) == {"saturated", "local_failed"}
    proxied.ask(SPEECH, {"tts": "status?code=500", "remote": "json"}, tier="paid")
    held = new_mark()
    holding = proxied.start(SPEECH, "hold", mark=held)
    proxied.workers.one(held)
    for _ in range(2):
        assert proxied.ask(SPEECH, BOTH, tier="paid").json()["worker"] == "remote"
    proxied.workers.release(held)
    assert holding.result(LIMIT_S).status_code == 200
    expected = {"saturated": before["saturated"] + 2, "local_failed": before["local_failed"] + 1}
    proxied.wait_until(lambda: proxied.overflows("tts") == expected, "both causes are counted")


@pytest.mark.parametrize("tier", ["paid", None])
def test_the_access_log_says_who_it_was_also_of_requests_that_went_to_the_remote(proxied, tier):
    answers = {
        "remote": proxied.ask(SPEECH, {"tts": "status?code=500", "remote": "json"}, tier="paid"),
        "tts": proxied.ask(SPEECH, "json", tier=tier),
    }
    for worker, asked in (("remote", "paid"), ("tts", tier or "free")):
        assert answers[worker].json()["worker"] == worker
        line = proxied.access_log(answers[worker].headers["x-request-id"])
        assert (line["client"], line["tier"], line["route"]) == ("anonymous", asked, "tts.speech")
    answer = proxied.ask(
        SPEECH, {"tts": "status?code=500", "remote": "json"}, tier="paid", base=proxied.mesh.operator_url
    )
    assert answer.json()["worker"] == "remote"
    assert proxied.access_log(answer.headers["x-request-id"])["client"] == "operator"


def test_envoy_has_nothing_to_say_about_old_names_in_its_configuration(proxied):
    assert "deprecated" not in proxied.mesh.log("envoy").lower()
