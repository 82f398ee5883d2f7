"""Transcription goes to the local worker first and to the managed one when that is busy, broken or missing."""

import pytest

from tests.fixtures.proxied import LIMIT_S, proxied_mesh
from tests.fixtures.workers import new_mark

pytestmark = pytest.mark.e2e

TRANSCRIPTION = "/v1/audio/transcriptions"
FALLBACK = {"stt": "json", "managed": "json"}


@pytest.fixture(scope="module")
def mesh_with_fallback(tmp_path_factory, make_mesh, free_ports, wait_until):
    upstreams = {"OMNISERVE_STT_UPSTREAM": "stt", "OMNISERVE_STT_OVERFLOW_UPSTREAM": "managed"}
    settings = {
        "OMNISERVE_SLOTS": "1",
        "OMNISERVE_STT_LOCAL_FIRST": "1",
        "OMNISERVE_STT_OVERFLOW_API_KEY": "managed-key",
    }
    folder = tmp_path_factory.mktemp("stt")
    with proxied_mesh(folder, make_mesh, free_ports, wait_until, upstreams, chats=False, **settings) as running:
        yield running


@pytest.fixture
def proxied(mesh_with_fallback):
    yield mesh_with_fallback
    # One good answer in between: a worker that only fails would be left alone for a while.
    assert mesh_with_fallback.ask(TRANSCRIPTION, FALLBACK).json()["worker"] == "stt"


def backend(answer):
    return answer.headers["x-omniserve-asr-backend"], answer.headers["x-omniserve-asr-attempts"]


@pytest.mark.parametrize(
    "path", [TRANSCRIPTION, "/v1/audio/translations", "/api/v1/audio/transcribe", "/api/v1/audio-file-extraction"]
)
def test_the_local_worker_is_asked_first_and_the_answer_says_so(proxied, path):
    answer = proxied.ask(path, FALLBACK, tier="paid")
    assert (answer.status_code, answer.json()["worker"]) == (200, "stt")
    assert backend(answer) == ("local", "1")


@pytest.mark.parametrize(
    ("code", "tier"),
    [
        (429, "free"),
        (502, "free"),
        (503, "free"),
        (504, "free"),
        (503, "paid"),
        (503, "sub"),
        (503, "background"),
        (503, None),
    ],
)
def test_a_worker_that_cannot_is_made_up_for_at_every_tier(proxied, code, tier):
    mark = new_mark()
    answer = proxied.ask(TRANSCRIPTION, {"stt": f"status?code={code}", "managed": "json"}, mark=mark, tier=tier)
    assert (answer.status_code, answer.json()["worker"]) == (200, "managed")
    assert proxied.workers.tried(mark) == ["stt", "managed"]
    assert backend(answer) == ("managed", "2")


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 415, 422, 500, 501])
def test_a_callers_error_is_returned_at_once(proxied, code):
    mark = new_mark()
    answer = proxied.ask(TRANSCRIPTION, {"stt": f"status?code={code}", "managed": "json"}, mark=mark)
    assert (answer.status_code, answer.headers["x-worker"]) == (code, "stt")
    assert proxied.workers.tried(mark) == ["stt"]
    assert backend(answer) == ("local", "1")


def test_a_broken_connection_is_made_up_for(proxied):
    mark = new_mark()
    answer = proxied.ask(TRANSCRIPTION, {"stt": "reset", "managed": "json"}, mark=mark)
    assert answer.json()["worker"] == "managed"
    assert backend(answer) == ("managed", "2")


def test_a_busy_device_sends_everybody_to_the_managed_worker_with_its_own_key(proxied):
    held = new_mark()
    holding = proxied.start(TRANSCRIPTION, {"stt": "hold", "managed": "json"}, mark=held)
    proxied.workers.one(held)
    for tier in ("paid", "free"):
        mark = new_mark()
        answer = proxied.ask(TRANSCRIPTION, FALLBACK, mark=mark, tier=tier, headers={"authorization": "Bearer callers"})
        assert (answer.status_code, answer.json()["worker"]) == (200, "managed")
        assert proxied.workers.one(mark).header("authorization") == ["Bearer managed-key"]
        assert backend(answer)[0] == "managed"
    proxied.workers.release(held)
    assert holding.result(LIMIT_S).json()["worker"] == "stt"
    proxied.wait_idle()


def test_when_both_fail_the_last_word_is_the_managed_ones(proxied):
    mark = new_mark()
    answer = proxied.ask(TRANSCRIPTION, {"stt": "status?code=503", "managed": "status?code=504"}, mark=mark)
    assert (answer.status_code, answer.headers["x-worker"]) == (504, "managed")
    assert proxied.workers.tried(mark) == ["stt", "managed"]
    assert backend(answer) == ("managed", "2")


def test_a_worker_cannot_say_who_it_is(proxied):
    answer = proxied.ask(TRANSCRIPTION, "status?code=200&h-x-omniserve-asr-backend=me&h-x-omniserve-asr-attempts=9")
    assert answer.headers.get_list("x-omniserve-asr-backend") == ["local"]
    assert answer.headers.get_list("x-omniserve-asr-attempts") == ["1"]
