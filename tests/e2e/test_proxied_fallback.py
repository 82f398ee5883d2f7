"""One upstream for whatever has none of its own, and a transcriber that is passed over while its device is short of memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fixtures.proxied import LIMIT_S, Proxied
from tests.fixtures.workers import new_mark, running_workers

pytestmark = pytest.mark.e2e

FORECAST = "/v1/forecasts"
SPEECH = "/v1/audio/speech"
TRANSCRIPTION = "/v1/audio/transcriptions"
MORE_THAN_ANY_MACHINE_HAS_MIB = 10**9


def settings(workers, min_free_mib):
    return f"""\
upstreams:
  default: {{endpoints: ["{workers.url("everything")}"]}}
  tts: {{endpoints: ["{workers.url("tts")}"]}}
  stt:
    local: {{endpoints: ["{workers.url("stt")}"], min_free_mib: {min_free_mib}}}
    overflow: {{endpoints: ["{workers.url("managed")}"], tiers: all}}
    replay_statuses: [429, 502, 503, 504]
routes:
  multimodal.voice_chat: {{timeout_ms: 1000}}
"""


@pytest.fixture(scope="module")
def proxied(tmp_path_factory, make_mesh, free_ports, wait_until):
    folder = tmp_path_factory.mktemp("fallback")
    config = folder / "omniserve.yaml"
    names = ("everything", "tts", "stt", "managed")
    with running_workers(folder, names, free_ports, wait_until) as workers, ThreadPoolExecutor(8) as pool:
        config.write_text(settings(workers, 1))
        with make_mesh(folder / "mesh", OMNISERVE_CONFIG=str(config), OMNISERVE_EMBEDDING_GGUF="none") as mesh:
            yield Proxied(mesh, workers, wait_until, pool)


def test_the_unified_upstream_serves_what_has_none_of_its_own_under_a_permit(proxied):
    mark = new_mark()
    answer = proxied.start(FORECAST, "hold", mark=mark)
    proxied.workers.one(mark)
    assert proxied.left()[1] == 1
    proxied.workers.release(mark)
    assert answer.result(LIMIT_S).status_code == 200
    proxied.wait_idle()
    for path in (
        "/v1/images/background-removals",
        "/generate_image",
        "/api/v1/image-caption",
        "/v1/animations/generations",
    ):
        assert proxied.ask(path, "json").json()["worker"] == "everything"


def test_a_worker_that_takes_longer_than_its_route_may_is_a_504_and_keeps_no_permit(proxied):
    mark = new_mark()
    answer = proxied.ask("/api/v1/voice-chat", "hold", mark=mark)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (504, "upstream_timeout")
    assert proxied.workers.tried(mark) == ["everything"]
    proxied.wait_idle()


def test_the_unified_upstream_serves_neither_what_has_its_own_nor_what_an_engine_serves(proxied):
    assert proxied.ask(SPEECH, "json").json()["worker"] == "tts"
    chat = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    assert proxied.ask("/v1/chat/completions", "json", content=chat).json()["object"] == "chat.completion"
    assert proxied.ask("/v1/video/generations", "json", tier="paid").status_code == 404


def test_a_transcriber_short_of_memory_is_passed_over_until_there_is_enough_again(proxied):
    def backend():
        answer = proxied.ask(TRANSCRIPTION, "json")
        assert answer.status_code == 200
        headers = answer.headers
        return headers["x-omniserve-asr-backend"], headers["x-omniserve-asr-attempts"], answer.json()["worker"]

    config = Path(proxied.mesh.environ["OMNISERVE_CONFIG"])
    assert backend() == ("local", "1", "stt")
    config.write_text(settings(proxied.workers, MORE_THAN_ANY_MACHINE_HAS_MIB))
    # While the new settings are on their way the local worker may be gone behind the gate and not yet before it.
    proxied.wait_until(lambda: backend() == ("managed", "1", "managed"), "the managed worker serves at once")
    seen = len(proxied.workers.seen(worker="stt"))
    assert backend() == ("managed", "1", "managed")
    assert len(proxied.workers.seen(worker="stt")) == seen
    config.write_text(settings(proxied.workers, 1))
    proxied.wait_until(lambda: backend() == ("local", "1", "stt"), "the local worker serves again")
