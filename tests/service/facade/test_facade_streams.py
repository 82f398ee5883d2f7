"""Streams: what is sent when, and how they end when something breaks."""

import asyncio

import httpx
import pytest

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason


async def answering(mesh, *texts: str, **finish):
    started = await mesh.llm.started()
    for text in texts:
        started.text(text)
    started.finish(**finish)
    return started


async def test_a_stream_tells_the_role_first_then_text_then_why_it_ended(mesh, read_stream):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answering(mesh, "Hel", 'lo "you"\n'))
        async with read_stream(mesh) as reading:
            assert reading.response.status_code == 200
            assert reading.response.headers["content-type"].startswith("text/event-stream")
            *chunks, last, done = await reading.rest()
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == 'Hello "you"\n'
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all("usage" not in chunk for chunk in [*chunks, last])
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{reading.response.headers['x-request-id']}"}


async def test_the_counts_come_in_one_last_chunk_when_asked_for(mesh, read_stream):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answering(mesh, "x"))
        async with read_stream(mesh, stream_options={"include_usage": True}) as reading:
            *chunks, counts, done = await reading.rest()
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert counts["choices"] == []
    assert counts["usage"]["total_tokens"] == 8
    assert counts["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_refusal_keeps_its_status_when_the_request_was_queued_before(mesh, read_stream):
    async def refuse():
        started = await mesh.llm.started()
        started.say(queued=llm_pb2.Queued(position=3))
        started.refuse(DomainError(Reason.ADMISSION_TIMEOUT, "waited 120 s", retry_after_ms=2500))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refuse())
        async with read_stream(mesh) as reading:
            body = await reading.response.aread()
    assert reading.response.status_code == 429
    assert reading.response.headers["retry-after"] == "3"
    error = httpx.Response(200, content=body).json()["error"]
    assert (error["reason"], error["code"], error["type"]) == ("admission_timeout",) * 2 + ("rate_limit_error",)
    assert error["retry_after_ms"] == 2500
    assert error["request_id"] == reading.response.headers["x-request-id"]


async def test_a_stream_that_waits_sends_its_headers_and_comments(open_mesh, read_stream):
    async with open_mesh(headers_after_s=0.05) as mesh, asyncio.TaskGroup() as tasks:

        async def queue():
            started = await mesh.llm.started()
            started.say(queued=llm_pb2.Queued(position=3))
            return started

        starting = tasks.create_task(queue())
        async with read_stream(mesh) as reading:
            started = await starting
            assert reading.response.status_code == 200
            assert [await reading.next(), await reading.next()] == [": queued 3"] * 2
            started.say(loading=llm_pb2.Loading(model="tiny", progress=0.5))
            while (line := await reading.next()) == ": queued 3":
                pass
            assert line == ": loading 0.50"
            started.text("x")
            started.finish()
            assert (await reading.rest())[-1] == "[DONE]"


async def test_a_failure_after_the_headers_is_an_event_and_no_done(open_mesh, read_stream):
    async with open_mesh(headers_after_s=0) as mesh, asyncio.TaskGroup() as tasks:

        async def queue():
            started = await mesh.llm.started()
            started.say(queued=llm_pb2.Queued(position=1))
            return started

        starting = tasks.create_task(queue())
        async with read_stream(mesh) as reading:
            (await starting).refuse(DomainError(Reason.QUEUE_FULL, "10000 wait", retry_after_ms=1500))
            events = await reading.rest()
    assert len(events) == 1
    error = events[0]["error"]
    assert error["message"] == "10000 wait"
    assert (error["status"], error["code"], error["retry_after_ms"]) == (429, "queue_full", 1500)


async def test_nothing_is_sent_while_nothing_is_known_of_the_request(open_mesh, read_stream):
    async with open_mesh(headers_after_s=0) as mesh, asyncio.TaskGroup() as tasks:

        async def refuse():
            started = await mesh.llm.started()
            await asyncio.sleep(0.1)  # long past the moment for headers
            started.refuse(DomainError(Reason.SATURATED, "busy"))

        tasks.create_task(refuse())
        async with read_stream(mesh) as reading:
            assert reading.response.status_code == 429
            await reading.response.aread()


async def test_a_broken_session_ends_streams_with_an_error_and_the_next_request_works(mesh, read_stream):
    async with asyncio.TaskGroup() as tasks:

        async def begin():
            started = await mesh.llm.started()
            started.text("half of")
            return started

        starting = tasks.create_task(begin())
        async with read_stream(mesh) as reading:
            assert (await reading.data())["choices"][0]["delta"]["role"] == "assistant"
            (await starting).break_stream()
            events = await reading.rest()
        assert events[-1]["error"]["reason"] == "upstream_failed"
        assert events[-1]["error"]["status"] == 502
        assert "10.0.0.1" not in events[-1]["error"]["message"]
        assert not any(event.get("choices", [{}])[0].get("finish_reason") for event in events)
        tasks.create_task(answering(mesh, "again"))
        answer = await mesh.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "once more"}]}
        )
    assert answer.json()["choices"][0]["message"]["content"] == "again"
    assert mesh.llm.sessions == 2


async def test_a_finish_reason_is_not_told_before_the_answer_is_whole(mesh, read_stream):
    async with asyncio.TaskGroup() as tasks:

        async def nearly():
            started = await mesh.llm.started()
            started.text("all of it", finish_reason=llm_pb2.FINISH_REASON_STOP)
            return started

        starting = tasks.create_task(nearly())
        async with read_stream(mesh) as reading:
            await reading.data()
            (await starting).break_stream()
            events = await reading.rest()
    assert "error" in events[-1]
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_done_before_every_choice_has_ended_is_an_error_and_no_end(mesh, read_stream, path):
    starting = asyncio.ensure_future(mesh.llm.started())
    begun = asyncio.ensure_future(_begin(starting))
    fields = {"prompt": "x"} if path == "/v1/completions" else {}
    async with read_stream(mesh, path, n=2, **fields) as reading:
        await begun
        events = [await reading.data()]
        (await starting).finish(choices=1)
        events += await reading.rest()
    assert events[-1]["error"]["reason"] == "engine_failed"
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])


async def _begin(starting) -> None:
    started = await starting
    started.text("one of two", index=0)
    started.text("two of two", index=1)


async def test_a_whole_answer_with_an_unended_choice_is_a_500(mesh, chat):
    asking = chat(n=2)
    (await mesh.llm.started()).finish(choices=1)
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "engine_failed")


async def test_requests_wait_for_an_llm_that_restarts(mesh, chat):
    await mesh.stop_llm()
    asking = chat()
    await mesh.start_llm()
    await answering(mesh, "back")
    assert (await asking).json()["choices"][0]["message"]["content"] == "back"


async def test_a_request_that_a_stopping_llm_has_not_begun_is_for_the_next_one(mesh, chat):
    asking = chat()
    started = await mesh.llm.started()
    started.say(queued=llm_pb2.Queued(position=1))
    started.say(failed=llm_pb2.Failed(reason="draining", message="the service is stopping"))
    await mesh.stop_llm()
    await mesh.start_llm()
    await answering(mesh, "back")
    assert (await asking).json()["choices"][0]["message"]["content"] == "back"


async def test_a_request_that_waited_in_vain_for_llm_is_a_503(open_mesh):
    async with open_mesh(peer_wait_s=0.05) as mesh:
        await mesh.stop_llm()
        answer = await mesh.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
        )
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "loading"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_hangs_up_cancels_the_generation_and_is_logged_as_a_499(mesh, chat, caplog, stream):
    caplog.set_level("INFO")
    asking = chat(stream=stream)
    started = await mesh.llm.started()
    started.say(queued=llm_pb2.Queued(position=1))
    asking.cancel()
    async with asyncio.timeout(20):
        await started.cancelled.wait()
        while not (left := [each for each in caplog.messages if "the caller left" in each]):
            await asyncio.sleep(0.01)
    assert "499" in f"{left[0]} {caplog.records[-1].__dict__}"
    assert mesh.running.facade.session.running == 0


async def test_a_caller_who_hangs_up_while_text_flows_cancels_the_generation(mesh, read_stream):
    async with asyncio.TaskGroup() as tasks:

        async def begin():
            started = await mesh.llm.started()
            started.text("x")
            return started

        starting = tasks.create_task(begin())
        async with read_stream(mesh) as reading:
            await reading.data()
        started = await starting
    async with asyncio.timeout(20):
        await started.cancelled.wait()


async def test_a_request_abandoned_before_llm_came_back_is_never_started(mesh, chat):
    await mesh.stop_llm()
    asking = chat()
    while mesh.running.facade.session.running == 0:
        await asyncio.sleep(0.01)
    asking.cancel()
    while mesh.running.facade.session.running:
        await asyncio.sleep(0.01)
    await mesh.start_llm()
    later = chat()
    started = await mesh.llm.started()
    started.finish()
    assert (await later).status_code == 200
    assert len(mesh.llm.running) == 1


async def test_many_requests_share_one_stream_to_llm(mesh, chat):
    asking = [chat(messages=[{"role": "user", "content": str(number)}]) for number in range(8)]
    started = [await mesh.llm.started() for _ in asking]
    for each in reversed(started):
        each.text(f"echo {each.start.chat.messages[0].content[0].text}")
    for each in started:
        each.finish()
    answers = [(await each).json()["choices"][0]["message"]["content"] for each in asking]
    assert answers == [f"echo {number}" for number in range(8)]
    assert mesh.llm.sessions == 1


async def test_prompts_of_one_request_are_numbered_on_and_worked_on_a_few_at_once(open_mesh):
    async with open_mesh(prompts_at_once=2) as mesh, asyncio.TaskGroup() as tasks:
        posting = tasks.create_task(
            mesh.http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4})
        )
        first, second = await mesh.llm.started(), await mesh.llm.started()
        assert len(mesh.llm.running) == 2
        second.text("B1", index=1)
        second.finish(choices=2)
        third = await mesh.llm.started()
        for started, word in ((first, "A"), (third, "C")):
            started.text(f"{word}0")
            started.finish(llm_pb2.FINISH_REASON_LENGTH, choices=2)
        answer = (await posting).json()
    assert [each.start.complete.prompt.text for each in (first, second, third)] == ["a", "b", "c"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == ["A0", "", "", "B1", "C0", ""]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2 + ["stop"] * 2 + ["length"] * 2
    assert answer["usage"]["total_tokens"] == 24


async def test_a_failed_prompt_ends_the_others_of_its_request(mesh):
    async with asyncio.TaskGroup() as tasks:
        posting = tasks.create_task(mesh.http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 4}))
        first, second = await mesh.llm.started(), await mesh.llm.started()
        second.refuse(DomainError(Reason.INVALID_REQUEST, "'prompt.text' is too odd", field="prompt.text"))
        answer = await posting
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert answer.json()["error"]["message"] == "'prompt' is too odd"
    async with asyncio.timeout(20):
        await first.cancelled.wait()


async def test_a_drain_lets_streams_end_and_tells_the_rest(mesh, read_stream):
    async with asyncio.TaskGroup() as tasks:

        async def begin():
            started = await mesh.llm.started()
            started.text("x")
            return started

        starting = tasks.create_task(begin())
        async with read_stream(mesh) as reading:
            await reading.data()
            started = await starting
            draining = tasks.create_task(mesh.running.drain())
            events = await reading.rest()
            assert events[-1]["error"]["reason"] == "draining"
            assert events[-1]["error"]["status"] == 503
            await draining
    assert started.cancelled.is_set()
    with pytest.raises(httpx.ConnectError):
        await mesh.http.get("/health")


async def test_a_drain_waits_for_streams_that_end_by_themselves(open_mesh, read_stream):
    async with open_mesh(drain_grace_s=20) as mesh, asyncio.TaskGroup() as tasks:

        async def begin():
            started = await mesh.llm.started()
            started.text("x")
            return started

        starting = tasks.create_task(begin())
        async with read_stream(mesh) as reading:
            await reading.data()
            draining = tasks.create_task(mesh.running.drain())
            while not mesh.running.facade.draining.is_set():
                await asyncio.sleep(0.01)
            (await starting).finish()
            assert (await reading.rest())[-1] == "[DONE]"
            await draining
