"""Proxied routes carry every byte as it is, both ways, and never one to the wrong caller."""

import hashlib

import httpx
import pytest

from tests.fixtures.proxied import LIMIT_S, proxied_mesh
from tests.fixtures.raw import connect, http1, read_http1, request_bytes
from tests.fixtures.workers import new_mark

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024
SPEECH = "/v1/audio/speech"
TRANSCRIPTION = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory, make_mesh, free_ports, wait_until):
    upstreams = {
        "OMNISERVE_TTS_UPSTREAM": "tts",
        "OMNISERVE_STT_UPSTREAM": "stt",
        "OMNISERVE_IMAGE_UPSTREAM": "image",
        "OMNISERVE_IMAGE_WORKER_UPSTREAM": "image_worker",
        "OMNISERVE_FORECAST_UPSTREAM": "forecast",
        "OMNISERVE_ANIMATION_UPSTREAM": "animation",
    }
    settings = {"OMNISERVE_SLOTS": "4", "OMNISERVE_TTS_PATH": "/speak", "OMNISERVE_FORECAST_PATH": "/predict"}
    folder = tmp_path_factory.mktemp("bytes")
    with proxied_mesh(folder, make_mesh, free_ports, wait_until, upstreams, chats=False, **settings) as running:
        yield running


def test_a_multipart_body_passes_byte_for_byte(proxied):
    boundary = "b0undary"
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a b.wav"\r\n\r\n'.encode()
    sent = part + bytes(range(256)) * 700 + f"\r\n--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    answer = proxied.ask(TRANSCRIPTION, "echo", content=sent, headers={"content-type": kind}, mark="multipart")
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.content == sent
    assert proxied.workers.one("multipart").sha256 == hashlib.sha256(sent).hexdigest()


def test_a_compressed_body_is_not_touched(proxied):
    sent = b"\x1f\x8b" + bytes(range(256))
    answer = proxied.ask(SPEECH, "echo", content=sent, headers={"content-encoding": "gzip"}, mark="gzip")
    assert answer.content == sent
    assert proxied.workers.one("gzip").header("content-encoding") == ["gzip"]


def test_events_arrive_while_the_worker_still_writes(proxied):
    mark = new_mark()
    with proxied.stream(SPEECH, "sse?chunks=4&hold_after=2", mark=mark, content=b'{"stream": true}') as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        events = (line for line in answer.iter_lines() if line)
        assert [next(events), next(events)] == [f"data: {mark} 0", f"data: {mark} 1"]
        assert proxied.workers.running() == [mark]
        proxied.workers.release(mark)
        assert list(events) == [f"data: {mark} 2", f"data: {mark} 3", "data: [DONE]"]


@pytest.mark.parametrize(("kind", "magic"), [("wav", b"RIFF"), ("png", b"\x89PNG\r\n\x1a\n")])
def test_media_keep_their_type_and_length(proxied, kind, magic):
    answer = proxied.ask(SPEECH, f"media?kind={kind}&bytes=100001")
    assert answer.headers["content-type"] == {"wav": "audio/wav", "png": "image/png"}[kind]
    assert (answer.headers["content-length"], len(answer.content)) == ("100001", 100_001)
    assert answer.content.startswith(magic)


@pytest.mark.parametrize(("do", "length"), [("chunked?parts=5&bytes=70001", 350_015), ("close?bytes=300000", 300_000)])
def test_answers_without_a_length_arrive_whole(proxied, do, length):
    assert len(proxied.ask(SPEECH, do).content) == length


def test_a_chunked_upload_arrives_whole(proxied):
    pieces = [bytes([number]) * 10_007 for number in range(20)]
    assert proxied.ask(TRANSCRIPTION, "echo", content=iter(pieces)).content == b"".join(pieces)


def test_a_client_that_announces_its_body_is_told_to_go_on(proxied):
    headers = [("expect", "100-continue"), ("content-length", "3"), ("x-do", "echo"), ("x-mark", new_mark())]
    lines = [f"POST {TRANSCRIPTION} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers)]
    with connect(proxied.mesh.public_target) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"abc")
        assert read_http1(connection).body == b"abc"


def test_80_mib_go_up_and_come_down(proxied):
    sent = hashlib.sha256(b"block").digest() * (80 * MIB // 32)
    answer = proxied.ask(TRANSCRIPTION, "echo", content=sent, mark="large")
    assert answer.status_code == 200
    assert answer.content == sent


def test_a_body_above_the_limit_never_reaches_a_worker(proxied):
    answer = proxied.ask(TRANSCRIPTION, "echo", content=bytes(80 * MIB + 1), mark="too-large")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert proxied.workers.seen(mark="too-large") == []


def test_a_worker_may_answer_before_it_has_read_the_body(proxied):
    head = request_bytes(f"POST {TRANSCRIPTION}", [("x-do", "early"), ("x-mark", "early")])
    head = head.replace(b"content-length: 0", b"content-length: 50000000")
    answer = http1(proxied.mesh.public_target, head + bytes(70_000))
    assert answer.status == 413
    assert b"from_worker" in answer.body
    proxied.wait_idle()


def test_the_query_is_kept_and_only_the_path_is_rewritten(proxied):
    proxied.ask("/api/v1/generate_speech?voice=a%20b&x=1&x=2", "json", mark="rewritten")
    assert proxied.workers.one("rewritten").target == "/speak?voice=a%20b&x=1&x=2"
    for path, mark, expected in (("/v1/forecasts", "alias", "/predict"), ("/forecast", "short", "/forecast")):
        proxied.ask(path, "json", mark=mark)
        assert proxied.workers.one(mark).target == expected


@pytest.mark.parametrize("path", ["/generate_image", "/caption", "/aesthetic_score", "/inpaint", "/style_transfer"])
def test_worker_contract_routes_reach_the_image_worker(proxied, path):
    assert proxied.ask(path, "json").json()["worker"] == "image_worker"


def test_head_has_the_length_and_no_body(proxied):
    answer = proxied.ask("/generate_image?x=1", "media?kind=png&bytes=5000", method="HEAD", content=None, mark="head")
    assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "5000", b"")
    assert proxied.workers.one("head").method == "HEAD"
    assert proxied.ask("/generate_image", "json", method="GET", content=None).json()["worker"] == "image_worker"
    proxied.wait_idle()


def test_an_animation_tells_its_worker_to_publish(proxied):
    proxied.ask("/v1/animations/generations", "json", mark="publish")
    assert proxied.workers.one("publish").header("x-animation-publish") == ["r2-searchable"]


@pytest.mark.parametrize("code", [201, 204, 302, 400, 404, 409, 422, 429, 500, 503])
def test_what_a_worker_says_is_passed_on(proxied, code):
    mark = new_mark()
    do = f"status?code={code}&h-retry-after=7&h-x-own=kept&h-set-cookie=a%3Db"
    answer = proxied.ask(SPEECH, do, mark=mark)
    assert answer.status_code == code
    assert (answer.headers["retry-after"], answer.headers["x-own"]) == ("7", "kept")
    if code != 204:
        assert answer.json()["error"]["code"] == "from_worker"
    assert proxied.workers.tried(mark) == ["tts"]


def test_a_worker_cannot_say_that_the_device_is_taken(proxied):
    do = "status?code=503&h-x-omniserve-overflow=saturated&h-x-worker-own=kept"
    answer = proxied.ask(SPEECH, do, mark="own-name")
    assert not [name for name in answer.headers if name.startswith("x-omniserve-")]
    assert answer.headers["x-worker-own"] == "kept"
    assert proxied.workers.tried("own-name") == ["tts"]


def test_an_answer_shorter_than_it_promised_is_broken_and_not_mended(proxied):
    with pytest.raises(httpx.TransportError):
        proxied.ask(SPEECH, "lie?declared=1000&sent=400")
    proxied.wait_idle()


def test_what_a_worker_sends_beyond_its_length_reaches_nobody(proxied):
    for _ in range(8):
        answer = proxied.ask(SPEECH, "lie?declared=10&sent=99")
        assert (answer.status_code, len(answer.content)) == (200, 10)
        mark = new_mark()
        after = proxied.ask(SPEECH, "json", mark=mark)
        assert (after.status_code, after.headers["x-worker"], after.json()["mark"]) == (200, "tts", mark)


@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_stream_that_breaks_off_is_broken_for_the_caller_too(proxied, how):
    received = proxied.read_until_broken(SPEECH, f"die?after=2&how={how}", mark=f"die-{how}")
    assert received.count(b"data: ") == 2
    assert proxied.workers.tried(f"die-{how}") == ["tts"]
    proxied.wait_idle()


def test_a_worker_that_breaks_before_the_first_byte_is_one_clean_error(proxied):
    answer = proxied.ask(SPEECH, "reset", mark="reset")
    assert answer.status_code in {502, 503}
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    assert proxied.workers.tried("reset") == ["tts"]
    proxied.wait_idle()


def test_workers_see_no_credential_and_none_of_the_meshs_headers(proxied):
    credentials = {"authorization": "Bearer a", "x-api-key": "b", "x-rapid-api-key": "c", "secret": "d"}
    answer = proxied.ask(f"{SPEECH}?secret=hunter2&voice=v", "json", mark="clean", headers=credentials)
    assert answer.status_code == 200
    seen = proxied.workers.one("clean")
    strangers = {name for name in seen.names() if name.startswith(("x-omniserve-", "x-om-", "x-envoy-"))}
    assert not strangers | (seen.names() & set(credentials))
    assert seen.query == "voice=v"
    assert seen.header("x-request-id") == [answer.headers["x-request-id"]]


@pytest.mark.parametrize(
    ("path", "setting"),
    [
        ("/v1/3d/generations", "OMNISERVE_3D_UPSTREAM"),
        ("/v1/video/generations", "OMNISERVE_H3_UPSTREAM"),
        ("/api/v1/image-caption", "OMNISERVE_MULTIMODAL_UPSTREAM"),
        ("/v1/training/jobs/run", "OMNISERVE_TRAINING_UPSTREAM"),
    ],
)
def test_a_route_that_nothing_serves_names_the_setting_that_would_enable_it(proxied, path, setting):
    answer = proxied.ask(path, "json", mark=new_mark())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found")
    assert setting in error["message"]


def test_many_callers_each_get_their_own_answer(proxied):
    marks = [new_mark() for _ in range(60)]
    for mark, answer in [(mark, proxied.start(SPEECH, "sse?chunks=3&delay_ms=2", mark=mark)) for mark in marks]:
        lines = [line for line in answer.result(LIMIT_S).text.splitlines() if line]
        assert lines == [f"data: {mark} {number}" for number in range(3)] + ["data: [DONE]"]
    assert all(proxied.workers.tried(mark) == ["tts"] for mark in marks)
