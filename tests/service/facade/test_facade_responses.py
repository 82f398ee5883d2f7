"""The Responses routes over a scripted llm and the real jobs: what is answered, kept, found again, and conforms."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

PATH = "/v1/responses"
CALL = llm_pb2.ToolCallDelta(index=0, id="c1", name="weather", arguments_json='{"city":"Paris"}')
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}


@pytest.fixture
def create(mesh):
    """Return `create(*deltas, **fields)`: the response that llm answers with these deltas."""

    async def made(*deltas, headers=None, **fields) -> httpx.Response:
        asking = asyncio.ensure_future(mesh.http.post(PATH, json={"input": "Hello", **fields}, headers=headers))
        started = await mesh.llm.started()
        for delta in deltas or ({"text": "Hi"},):
            started.say(output=llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(**delta)]))
        started.finish()
        made.asked = started.start.chat
        return await asking

    return made


def events_of(text: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]


async def test_a_response_is_kept_and_found_again(mesh, create):
    answer = await create(metadata={"a": "b"})
    response = answer.json()
    assert answer.status_code == 200
    assert response["output"][0]["content"][0]["text"] == "Hi"
    assert (await mesh.http.get(f"{PATH}/{response['id']}")).json() == response
    listed = (await mesh.http.get(f"{PATH}/{response['id']}/input_items")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Hello"]
    assert (await mesh.http.delete(f"{PATH}/{response['id']}")).json() == {
        "id": response["id"],
        "object": "response",
        "deleted": True,
    }
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        gone = await mesh.http.request(method, f"{PATH}/{response['id']}{path}")
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "response_id")


async def test_what_is_not_stored_is_not_found(mesh, create):
    response = (await create(store=False)).json()
    assert (await mesh.http.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_a_conversation_goes_on_with_its_calls_and_without_its_instructions(create):
    first = (await create({"reasoning": "hm"}, {"tool_calls": [CALL]}, tools=[TOOL], instructions="Be kind.")).json()
    answered = [{"type": "function_call_output", "call_id": "c1", "output": "sun"}]
    second = (await create(input=answered, previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    assert [message.role for message in create.asked.messages] == ["user", "assistant", "tool"]
    assert create.asked.messages[1].reasoning == "hm"
    assert create.asked.messages[1].tool_calls[0].arguments_json == '{"city":"Paris"}'
    await create(input="And now?", previous_response_id=second["id"])
    assert [message.role for message in create.asked.messages] == ["user", "assistant", "tool", "assistant", "user"]


async def test_responses_belong_to_the_key_that_made_them(mesh, create):
    alice, bob = {"x-omniserve-client": "alice"}, {"x-omniserve-client": "bob"}
    response = (await create(headers=alice)).json()
    assert (await mesh.http.get(f"{PATH}/{response['id']}", headers=alice)).status_code == 200
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        hidden = await mesh.http.request(method, f"{PATH}/{response['id']}{path}", headers=bob)
        assert hidden.status_code == 404
    asked = {"input": "x", "previous_response_id": response["id"]}
    refused = await mesh.http.post(PATH, json=asked, headers=bob)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
    assert (await mesh.http.get(f"{PATH}/{response['id']}", headers=alice)).status_code == 200


async def test_a_stream_is_the_response_that_is_kept(mesh, create):
    text = (await create({"text": "Hel"}, {"text": "lo"}, stream=True)).text
    events = events_of(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert (await mesh.http.get(f"{PATH}/{response['id']}")).json() == response
    again = events_of((await mesh.http.get(f"{PATH}/{response['id']}", params={"stream": "true"})).text)
    assert again[-1]["response"] == response
    later = events_of(
        (await mesh.http.get(f"{PATH}/{response['id']}", params={"stream": "true", "starting_after": 3})).text
    )
    assert later == again[4:]


async def test_a_stream_that_breaks_fails_and_is_not_kept(mesh):
    async with asyncio.TaskGroup() as tasks:

        async def script():
            started = await mesh.llm.started()
            started.text("Hi")
            started.refuse(DomainError(Reason.ENGINE_FAILED, "It died."))

        tasks.create_task(script())
        async with mesh.http.stream("POST", PATH, json={"input": "x", "stream": True}) as response:
            events = events_of("\n".join([line async for line in response.aiter_lines()]))
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert events[-1]["code"] == "engine_failed"
    assert (await mesh.http.get(f"{PATH}/{events[0]['response']['id']}")).status_code == 404


async def test_pages_of_input_items(mesh, create):
    said = [{"role": "user", "content": str(number)} for number in range(5)]
    response = (await create(input=said)).json()
    path = f"{PATH}/{response['id']}/input_items"
    first = (await mesh.http.get(path, params={"limit": 3})).json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3", "2"]
    assert (first["has_more"], first["last_id"]) == (True, first["data"][-1]["id"])
    rest = (await mesh.http.get(path, params={"limit": 3, "after": first["last_id"]})).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["1", "0"]
    assert not rest["has_more"]
    for query, field in (({"limit": 101}, "limit"), ({"order": "x"}, "order")):
        refused = await mesh.http.get(path, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    unknown = await mesh.http.get(path, params={"after": "nothing"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "after")


async def test_there_is_nothing_to_cancel(mesh, create):
    response = (await create()).json()
    refused = await mesh.http.post(f"{PATH}/{response['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")


async def test_jobs_that_cannot_be_reached_are_said_so(mesh, create, monkeypatch):
    responses = mesh.running.facade.responses
    monkeypatch.setattr(responses, "_peer", replace(responses._peer, wait_s=0.05))
    await mesh.stop_jobs()
    answer = await create()
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "loading")
    assert (await create(store=False)).status_code == 200


async def test_responses_and_their_events_conform(mesh, create, check_openai):
    logprob = llm_pb2.TokenLogprob(token="hi", raw=b"hi", logprob=-0.5)
    top = llm_pb2.TokenLogprob(token="hi", raw=b"hi", logprob=-0.5, id=3, top=[logprob])
    kinds = {
        "text": [{"text": "hi"}],
        "nothing": [{}],
        "logprobs": [{"text": "hi", "logprobs": [top]}],
        "a call": [{"reasoning": "hm"}, {"tool_calls": [CALL]}],
    }
    for deltas in kinds.values():
        response = (await create(*deltas, tools=[TOOL])).json()
        check_openai("Response", response)
        for event in events_of((await create(*deltas, stream=True, instructions="i")).text):
            check_openai(_EVENTS[event["type"]], event)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    ]
    response = (await create(input=items)).json()
    check_openai("ResponseItemList", (await mesh.http.get(f"{PATH}/{response['id']}/input_items")).json())


_EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.completed": "ResponseCompletedEvent",
}
