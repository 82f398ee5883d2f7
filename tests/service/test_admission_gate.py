"""The gate with a real Envoy: a permit for each exchange behind it, for exactly as long as it takes."""

import asyncio
import json
import signal

import grpc.aio
import httpx
import pytest
from envoy_subset import ext_proc_pb2

from services.kit.tokens import ensure_token
from tests.fixtures.gated import LIMIT_S, Gated, gated
from tests.fixtures.workers import new_mark

SLOTS = 2
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@pytest.fixture(scope="module")
def shared(tmp_path_factory, free_ports, wait_until):
    folder = tmp_path_factory.mktemp("gate")
    with gated(folder, free_ports, wait_until, SLOTS=str(SLOTS), ADMISSION_TIMEOUT_S="60") as running:
        yield running


@pytest.fixture
async def gate(shared: Gated):
    yield shared
    for mark in shared.workers.running():
        shared.workers.release(mark)
    await shared.wait_idle()


def error_of(answer: httpx.Response) -> dict[str, object]:
    error = answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["code"] == error["reason"]
    return error


async def test_a_worker_never_runs_more_than_the_slots(gate: Gated):
    tiers = ("paid", "sub", "free")
    asks = [gate.ask("/", "slow?ms=10", tier=tiers[number % 3]) for number in range(60)]
    answers = await asyncio.gather(*asks)
    assert [answer.status_code for answer in answers] == [200] * 60
    assert gate.workers.most_at_once("llm", "image") <= SLOTS


async def test_a_request_waits_until_an_exchange_is_over(gate: Gated):
    running = [await gate.running() for _ in range(SLOTS)]
    third = gate.start_ask("/", "json", mark=(waiting := new_mark()))
    await gate.wait_for(in_use=SLOTS, waiting=1)
    assert gate.workers.seen(mark=waiting) == []
    gate.workers.release(running[0][0])
    assert (await third).status_code == 200
    gate.workers.release(running[1][0])
    assert [(await answer).status_code for _, answer in running] == [200, 200]


async def test_the_permit_of_a_stream_lasts_to_its_last_event(gate: Gated):
    mark = new_mark()
    lines = gate.lines("/", "sse?chunks=4&hold_after=2", mark=mark)
    assert [await anext(lines), await anext(lines)] == [f"data: {mark} 0", f"data: {mark} 1"]
    await gate.wait_for(in_use=1)
    gate.workers.release(mark)
    assert [line async for line in lines] == [f"data: {mark} 2", f"data: {mark} 3", "data: [DONE]"]
    await gate.wait_idle()


async def test_a_request_for_the_whole_device_waits_for_all_of_it_and_is_not_overtaken(gate: Gated):
    speech, answer = await gate.running()
    image = gate.start_ask("/image", "json")
    await gate.wait_for(waiting=1)
    cheap = gate.start_ask("/", "json")
    await gate.wait_for(in_use=1, waiting=2)
    gate.workers.release(speech)
    assert [(await each).status_code for each in (answer, image, cheap)] == [200] * 3


async def test_a_client_that_leaves_gives_its_permit_back(gate: Gated):
    _, answer = await gate.running()
    answer.cancel()
    await gate.wait_idle()


async def test_a_client_that_leaves_the_line_is_never_let_in(gate: Gated):
    running = [await gate.running() for _ in range(SLOTS)]
    left = gate.start_ask("/", "json", mark=(mark := new_mark()))
    await gate.wait_for(waiting=1)
    left.cancel()
    await gate.wait_for(waiting=0)
    for one, answer in running:
        gate.workers.release(one)
        await answer
    assert gate.workers.seen(mark=mark) == []


async def test_a_worker_that_breaks_off_gives_the_permit_back(gate: Gated):
    with pytest.raises(httpx.RemoteProtocolError):
        await gate.ask("/", "die?after=2")
    assert (await gate.ask("/", "reset")).status_code == 503
    await gate.wait_idle()


async def test_workers_see_neither_the_meshs_headers_nor_credentials(gate: Gated):
    mark = new_mark()
    headers = {
        "x_api_key": "k",
        "authorization": "Bearer k",
        "x_omniserve_admitted": "e0",
        "x_omniserve_ask": "modality=llm",
    }
    answer = await gate.ask("/", "json", mark=mark, tier="paid", **headers)
    seen = gate.workers.one(mark)
    assert not [name for name in seen.names() if name.startswith(("x-omniserve-", "x-om-"))]
    assert not seen.names() & {"x-api-key", "authorization"}
    assert seen.header("x-request-id") == [answer.headers["x-request-id"]]


async def test_a_forced_background_route_waits_for_an_idle_device_whatever_the_caller_asks(gate: Gated):
    first, answer = await gate.running()
    background = gate.start_ask("/background", "json", tier="paid")
    await gate.wait_for(in_use=1, waiting=1)
    assert (await gate.ask("/", "json", tier="free")).status_code == 200
    gate.workers.release(first)
    assert (await background).status_code == (await answer).status_code == 200


async def test_a_paying_route_turns_others_away_before_the_worker_hears_of_them(gate: Gated):
    mark = new_mark()
    for tier in ("", "free", "background"):
        answer = await gate.ask("/paying", "json", mark=mark, tier=tier)
        assert (answer.status_code, error_of(answer)["code"]) == (402, "payment_required")
        assert "retry-after" not in answer.headers
    assert gate.workers.seen(mark=mark) == []
    assert (await gate.ask("/paying", "json", mark=mark, tier="paid")).status_code == 200


async def test_a_request_that_may_go_elsewhere_does_not_wait_and_says_so(gate: Gated):
    running = [await gate.running() for _ in range(SLOTS)]
    answer = await gate.ask("/try", "json", mark=(mark := new_mark()))
    assert (answer.status_code, error_of(answer)["code"]) == (503, "saturated")
    assert int(answer.headers["retry-after"]) >= 1
    assert "x-omniserve-overflow" not in answer.headers
    away = await gate.ask("/away", "json", mark=mark)
    assert (away.status_code, away.json()["worker"]) == (200, "remote")
    assert gate.workers.tried(mark) == ["remote"]
    for one, answer_of in running:
        gate.workers.release(one)
        await answer_of
    assert (await gate.ask("/away", "json")).json()["worker"] == "llm"


async def test_a_workers_own_word_of_saturation_sends_nobody_away(gate: Gated):
    mark = new_mark()
    answer = await gate.ask("/away", "status?code=503&h-x-omniserve-overflow=saturated", mark=mark)
    assert (answer.status_code, gate.workers.tried(mark)) == (503, ["llm"])
    assert answer.json()["error"]["code"] == "from_worker"


async def test_a_tier_that_does_not_exist_is_a_bad_request(gate: Gated):
    answer = await gate.ask("/", "json", tier="gold")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_request")


async def test_a_route_that_asks_for_nothing_is_never_let_through(gate: Gated):
    answer = await gate.ask("/broken", "json", mark=(mark := new_mark()))
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
    assert gate.workers.seen(mark=mark) == []


async def test_big_bodies_pass_both_ways(gate: Gated):
    body = bytes(range(256)) * 4096 * 20
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        answer = await client.post(f"{gate.url}/", content=body, headers=gate.headers("echo"))
    assert (answer.status_code, answer.content == body) == (200, True)


async def test_every_event_of_envoy_is_answered_and_only_envoy_is_heard(gate: Gated):
    address = gate.environ["OMNISERVE_ADMISSION_CHECKS_LISTEN"]
    head = ext_proc_pb2.HttpHeaders(
        headers=ext_proc_pb2.HeaderMap(
            headers=[ext_proc_pb2.HeaderValue(key="x-omniserve-ask", raw_value=b"route=r;upstream=llm;modality=llm")]
        )
    )
    events = {
        "request_headers": head,
        "request_body": ext_proc_pb2.HttpBody(),
        "response_headers": ext_proc_pb2.HttpHeaders(),
        "response_body": ext_proc_pb2.HttpBody(),
        "response_trailers": ext_proc_pb2.HttpTrailers(),
        "request_trailers": ext_proc_pb2.HttpTrailers(),
    }
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.stream_stream(
            PROCESS,
            request_serializer=ext_proc_pb2.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc_pb2.ProcessingResponse.FromString,
        )
        for caller, code in (
            ("envoy", None),
            ("llm", grpc.StatusCode.UNAUTHENTICATED),
            ("envoy-public", grpc.StatusCode.UNAUTHENTICATED),
        ):
            token = ensure_token(gate.state_dir, caller)
            call = method(metadata=(("x-omniserve-service-token", token),))
            if code is not None:
                assert await call.code() is code
                continue
            for name, event in events.items():
                await call.write(ext_proc_pb2.ProcessingRequest(**{name: event}))
                answer = await call.read()
                assert answer.WhichOneof("response") == name
            await gate.wait_for(in_use=1)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
            await gate.wait_idle()


# ---- settings of their own ------------------------------------------------------------------------------------------


def check_later(answer: httpx.Response, code: str) -> None:
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (429, code)
    assert int(answer.headers["retry-after"]) >= 1
    assert error["retry_after_ms"] >= 1000


async def test_a_full_queue_says_when_to_come_back(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS="1", MAX_QUEUE="1") as gate:
        mark, answer = await gate.running()
        waiter = gate.start_ask("/", "json")
        await gate.wait_for(waiting=1)
        check_later(await gate.ask("/", "json"), "queue_full")
        gate.workers.release(mark)
        assert (await answer).status_code == (await waiter).status_code == 200


async def test_a_wait_that_is_too_long_says_when_to_come_back(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS="1", ADMISSION_TIMEOUT_S="0.5") as gate:
        mark, answer = await gate.running()
        check_later(await gate.ask("/", "json"), "admission_timeout")
        gate.workers.release(mark)
        assert (await answer).status_code == 200


async def raw_get(gate: Gated, burst: "asyncio.Semaphore") -> bytes:
    """Ask on a connection of its own with as little client as possible; return the status line."""
    async with burst:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.ports.public)
    headers = "".join(f"{name}: {value}\r\n" for name, value in gate.headers("json").items())
    writer.write(f"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n".encode())
    try:
        async with asyncio.timeout(3 * LIMIT_S):
            answer = await reader.read()
    finally:
        writer.close()
    return answer.split(b"\r\n", 1)[0]


@pytest.mark.alone
@pytest.mark.timeout(600)
async def test_of_a_thousand_and_more_that_wait_none_is_lost(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS="4", ADMISSION_TIMEOUT_S="300") as gate:
        running = [await gate.running() for _ in range(4)]
        burst = asyncio.Semaphore(100)
        many = 3_000
        waiters = [asyncio.ensure_future(raw_get(gate, burst)) for _ in range(many)]
        await gate.wait_for(in_use=4, waiting=many, limit_s=3 * LIMIT_S)
        for mark, answer in running:
            gate.workers.release(mark)
            await answer
        assert set(await asyncio.gather(*waiters)) == {b"HTTP/1.1 200 OK"}
        assert gate.workers.most_at_once("llm") == 4
        await gate.wait_idle()


async def test_a_restart_of_admission_cuts_no_stream_and_gives_no_slot_twice(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS="2") as gate:
        mark = new_mark()
        stream = gate.lines("/", "sse?chunks=3&hold_after=1", mark=mark)
        await anext(stream)
        other, answer = await gate.running()
        waiter = gate.start_ask("/", "json")
        await gate.wait_for(in_use=2, waiting=1)
        await asyncio.to_thread(gate.end, "admission", signal.SIGTERM)
        later = gate.start_ask("/", "json", mark=(later_id := new_mark()))
        await asyncio.sleep(0.5)
        assert not waiter.done()
        assert not later.done()
        gate.start("admission")
        await gate.wait_for(in_use=2, waiting=2)
        assert gate.workers.seen(mark=later_id) == []
        gate.workers.release(other)
        assert {(await each).status_code for each in (waiter, later, answer)} == {200}
        gate.workers.release(mark)
        assert [line async for line in stream][-1] == "data: [DONE]"
        await gate.wait_idle()
        assert gate.workers.most_at_once("llm") == 2


async def test_an_admission_that_was_killed_and_does_not_come_back_is_a_503(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS="1") as gate:
        mark, answer = await gate.running()
        waiter = gate.start_ask("/", "json")
        await gate.wait_for(in_use=1, waiting=1)
        await asyncio.to_thread(gate.end, "admission")
        for refused in await asyncio.gather(waiter, gate.ask("/", "json")):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "admission_unavailable")
            assert refused.headers["retry-after"] == "1"
        gate.workers.release(mark)
        assert (await answer).status_code == 200


async def test_an_edge_that_tells_no_gauges_is_waited_for_only_so_long(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS="1", ADMISSION_SETTLE_S="1") as gate:
        assert (await gate.ask("/", "json")).status_code == 200
        memory = json.loads((gate.state_dir / "admission.json").read_text())
        assert memory["uses"] == [["llm", "gpu0", 1, 1]]
        gate.end("admission")
        gate.environ = {**gate.environ, "OMNISERVE_EDGE_ADDRESS": "127.0.0.1:1"}
        gate.start("admission")
        await asyncio.to_thread(gate.wait_ready)
        told = lambda: "granting without knowing" in gate.log("admission")  # noqa: E731
        await asyncio.to_thread(wait_until, told, "admission no longer waits for the gauges")
        assert (await gate.ask("/", "json")).status_code == 200
