"""Workers that know nothing of permits are never asked for more than the device has, and a permit ends with its exchange."""

import asyncio
import contextlib
import json
import resource
import uuid
from collections import Counter

import httpx
import pytest

from tests.fixtures.collector import collector
from tests.fixtures.load import burst
from tests.fixtures.proxied import LIMIT_S, proxied_mesh
from tests.fixtures.workers import new_mark

pytestmark = pytest.mark.e2e

SPEECH = "/v1/audio/speech"
IMAGE = "/v1/images/generations"
ANIMATION = "/v1/animations/generations"
VIDEO = "/v1/video/generations"


@pytest.fixture(scope="module")
def collected():
    """The spans that the mesh has sent so far, and where it sends them."""
    with collector() as (sink, endpoint):
        yield sink.spans, endpoint


@pytest.fixture(scope="module")
def mesh_of_two(collected, tmp_path_factory, make_mesh, free_ports, wait_until):
    upstreams = {
        "OMNISERVE_TTS_UPSTREAM": "tts",
        "OMNISERVE_IMAGE_UPSTREAM": "image",
        "OMNISERVE_ANIMATION_UPSTREAM": "animation",
        "OMNISERVE_H3_UPSTREAM": "h3",
    }
    settings = {
        "OMNISERVE_SLOTS": "2",
        "OMNISERVE_ADMISSION_TIMEOUT_S": "600",
        "OMNISERVE_H3_API_KEY": "h3-own-key",
    }
    # Traced is only what a caller wants to be.
    settings |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collected[1], "OMNISERVE_EDGE_TRACED_PERCENT": "0"}
    folder = tmp_path_factory.mktemp("permits")
    with proxied_mesh(folder, make_mesh, free_ports, wait_until, upstreams, **settings) as running:
        yield running


@pytest.fixture
def proxied(mesh_of_two):
    yield mesh_of_two
    for mark in mesh_of_two.workers.running():
        mesh_of_two.workers.release(mark)
    mesh_of_two.wait_idle()


@pytest.fixture
def many_files():
    """As many open files as the system lets a process have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def hold(proxied, path=SPEECH, **more):
    """Start a request that holds at its worker; return its mark and answer."""
    mark = new_mark()
    answer = proxied.start(path, "hold", mark=mark, **more)
    proxied.workers.one(mark)
    return mark, answer


def test_a_worker_never_runs_more_than_the_slots(proxied):
    marks = [new_mark() for _ in range(40)]
    tiers = ["paid", "sub", "free"]
    answers = [proxied.start(SPEECH, "slow?ms=10", mark=mark, tier=tiers[n % 3]) for n, mark in enumerate(marks)]
    assert [answer.result(LIMIT_S).status_code for answer in answers] == [200] * 40
    assert proxied.workers.most_at_once("tts", "image") == 2
    assert all(proxied.workers.tried(mark) == ["tts"] for mark in marks)


def test_the_wait_for_a_permit_is_in_the_callers_trace(proxied, collected, wait_until):
    running = [hold(proxied), hold(proxied)]
    chat = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    asked = {"/v1/chat/completions": chat, SPEECH: b"{}"}
    traces = {path: uuid.uuid4().hex for path in asked}
    answers = []
    for path, content in asked.items():
        traced = {"traceparent": f"00-{traces[path]}-b7ad6b7169203331-01"}
        answers.append(proxied.start(path, "json", content=content, headers=traced))
        proxied.wait_waiting(len(answers))
    for mark, _ in running:
        proxied.workers.release(mark)
    assert [each.result(LIMIT_S).status_code for each in answers] == [200, 200]

    def spans_of(path):
        return {each.name: each for each in collected[0] if each.trace_id.hex() == traces[path]}

    for path, modality in (("/v1/chat/completions", "llm"), (SPEECH, "tts")):
        wait_until(lambda path=path: "permit wait" in spans_of(path), f"the wait of {path} is told")
        wait = spans_of(path)["permit wait"]
        told = {tag.key: tag.value.string_value for tag in wait.attributes}
        assert (told["omniserve.modality"], told["omniserve.outcome"]) == (modality, "granted")
        assert wait.start_time_unix_nano < wait.end_time_unix_nano
        wait_until(
            lambda path=path, wait=wait: wait.parent_span_id in {each.span_id for each in spans_of(path).values()},
            "and whose it is",
        )
    chatting = next(each for name, each in spans_of("/v1/chat/completions").items() if name.startswith("chat "))
    assert spans_of("/v1/chat/completions")["permit wait"].parent_span_id == chatting.span_id


def test_an_image_waits_for_the_whole_device(proxied):
    speech, answer = hold(proxied)
    image = new_mark()
    painted = proxied.start(IMAGE, "json", mark=image)
    proxied.wait_waiting(1)
    assert proxied.workers.seen(mark=image) == []
    proxied.workers.release(speech)
    assert painted.result(LIMIT_S).json()["worker"] == "image"
    assert answer.result(LIMIT_S).status_code == 200


def test_an_operator_holds_the_device_as_soon_as_what_runs_has_ended(proxied):
    mark, answer = hold(proxied)

    def ask(path):
        address = f"{proxied.mesh.operator_url}{path}"
        return httpx.post(address, headers={"content-type": "application/json"}, timeout=LIMIT_S)

    holding = proxied.pool.submit(ask, "/admin/hold?seconds=600&modalities=tts")
    proxied.wait_until(lambda: proxied.pools()["gpu0"].holds, "the hold is in force")
    waiting = proxied.start(SPEECH, "json", tier="paid")
    proxied.wait_waiting(1)
    assert not holding.done()
    proxied.workers.release(mark)
    assert answer.result(LIMIT_S).status_code == 200
    told = holding.result(LIMIT_S).json()
    assert (told["drained"], told["in_flight"]) == (True, 0)
    assert proxied.ask(IMAGE, "json").status_code == 200, "what is not held goes on"
    assert not waiting.done()
    assert ask("/admin/release").json() == {"released": True}
    assert waiting.result(LIMIT_S).status_code == 200
    assert ask("/admin/release").json() == {"released": False}


def test_the_head_of_the_line_is_not_overtaken_by_something_cheaper(proxied):
    speech, _ = hold(proxied)
    image = proxied.start(IMAGE, "json", mark=(image_id := new_mark()))
    proxied.wait_waiting(1)
    cheap = proxied.start(SPEECH, "json", mark=(cheap_id := new_mark()))
    proxied.wait_waiting(2)
    proxied.workers.release(speech)
    assert (image.result(LIMIT_S).status_code, cheap.result(LIMIT_S).status_code) == (200, 200)
    order = [each.mark for each in proxied.workers.seen() if each.mark in {image_id, cheap_id}]
    assert order == [image_id, cheap_id]


def test_better_tiers_are_served_first(proxied):
    first, _ = hold(proxied, IMAGE)
    waiting = {}
    for count, tier in enumerate(("background", "free", "sub", "paid"), 1):
        waiting[tier] = proxied.start(IMAGE, "json", mark=f"{first}-{tier}", tier=tier)
        proxied.wait_waiting(count)
    proxied.workers.release(first)
    assert [answer.result(LIMIT_S).status_code for answer in waiting.values()] == [200] * 4
    order = [each.mark.rpartition("-")[2] for each in proxied.workers.seen() if each.mark.startswith(f"{first}-")]
    assert order == ["paid", "sub", "free", "background"]


def test_an_animation_is_background_whatever_was_asked(proxied):
    speech, _ = hold(proxied)
    moving = proxied.start(ANIMATION, "json", mark=(mark := new_mark()), tier="paid")
    proxied.wait_waiting(1)
    # A paid animation would be the head of the line; background stands behind this one, which passes at once.
    assert proxied.ask(SPEECH, "json", tier="free").status_code == 200
    assert proxied.workers.seen(mark=mark) == []
    proxied.workers.release(speech)
    assert moving.result(LIMIT_S).json()["worker"] == "animation"


def test_a_route_for_payers_is_402_for_others_before_anybody_is_contacted(proxied):
    for tier in ("sub", "free", "background", None):
        answer = proxied.ask(VIDEO, "json", mark="not-paid", tier=tier)
        assert (answer.status_code, answer.json()["error"]["code"]) == (402, "payment_required")
    assert proxied.workers.seen(worker="h3") == []
    paid = proxied.ask(VIDEO, "json", mark="paid-video", tier="paid", headers={"authorization": "Bearer callers-own"})
    assert paid.json()["worker"] == "h3"
    seen = proxied.workers.one("paid-video")
    assert seen.path == "/predict-sync"
    assert "h3-own-key" in "".join(seen.header("authorization") + seen.header("x-api-key"))
    assert "callers-own" not in str(seen.headers)


def test_a_service_that_places_its_requests_itself_takes_no_permit(proxied):
    image, _ = hold(proxied, IMAGE)
    assert proxied.ask(VIDEO, "json", tier="paid").status_code == 200
    proxied.workers.release(image)


def test_a_stream_keeps_its_permit_until_its_end(proxied):
    mark, waiting_id = new_mark(), new_mark()
    with proxied.stream(IMAGE, "sse?chunks=2&hold_after=1", mark=mark) as answer:
        events = (line for line in answer.iter_lines() if line)
        next(events)
        waiting = proxied.start(SPEECH, "json", mark=waiting_id)
        proxied.wait_waiting(1)
        assert proxied.workers.seen(mark=waiting_id) == []
        proxied.workers.release(mark)
        assert list(events)[-1] == "data: [DONE]"
    assert waiting.result(LIMIT_S).status_code == 200


def test_a_caller_who_leaves_a_stream_frees_its_permit(proxied):
    mark = new_mark()
    with proxied.stream(IMAGE, "drip", mark=mark) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        assert proxied.left()[0] == 2
    proxied.wait_idle()
    proxied.wait_until(lambda: proxied.workers.one(mark).outcome == "gone", "the worker saw it too")


def left_without_an_answer(proxied):
    """Return the paths of those in the access log who did."""
    lines = (proxied.mesh.state_dir / "logs" / "access.log").read_text().split("\n")[:-1]
    return Counter(line["path"] for line in map(json.loads, lines) if line["status"] == 499)


def test_a_caller_who_leaves_before_the_first_byte_frees_its_permit_and_is_a_499_in_the_log(proxied):
    mark, before = new_mark(), left_without_an_answer(proxied)
    with pytest.raises(httpx.ReadTimeout):
        httpx.request(**{**proxied.request(IMAGE, "hold", mark=mark), "timeout": 1})
    proxied.wait_idle()
    proxied.wait_until(lambda: proxied.workers.one(mark).outcome == "gone", "the worker saw it too")
    proxied.wait_until(lambda: left_without_an_answer(proxied) - before == Counter([IMAGE]), "it is in the access log")


def test_a_caller_who_leaves_the_line_never_reaches_a_worker(proxied):
    image, _ = hold(proxied, IMAGE)
    mark = new_mark()
    with pytest.raises(httpx.ReadTimeout):
        httpx.request(**{**proxied.request(SPEECH, "json", mark=mark), "timeout": 1})
    proxied.wait_waiting(0)
    proxied.workers.release(image)
    proxied.wait_idle()
    assert proxied.workers.seen(mark=mark) == []


@pytest.mark.parametrize("do", ["reset", "die?after=1", "lie?declared=100&sent=5", "status?code=500", "early"])
def test_a_failing_worker_keeps_no_permit(proxied, do):
    with contextlib.suppress(httpx.TransportError):
        proxied.ask(IMAGE, do)
    proxied.wait_idle()
    assert proxied.ask(IMAGE, "json").status_code == 200


async def test_a_burst_that_waits_in_line_loses_nobody(proxied, many_files):
    held, answer = hold(proxied, IMAGE)
    marks = [new_mark() for _ in range(300)]  # tests/service/test_admission_gate.py has the burst of thousands
    waiting = asyncio.create_task(burst(proxied.mesh.public_target, marks, "json"))
    await asyncio.to_thread(proxied.wait_waiting, len(marks))
    assert not {each.mark for each in proxied.workers.seen()} & set(marks)
    await asyncio.to_thread(proxied.workers.release, held)
    assert set(await waiting) == {200}
    tried = Counter(each.mark for each in proxied.workers.seen(worker="tts"))
    assert {tried[mark] for mark in marks} == {1}
    assert proxied.workers.most_at_once("tts", "image", "animation") == 2
    assert answer.result(LIMIT_S).status_code == 200
