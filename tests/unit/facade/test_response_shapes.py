"""Responses: bodies become chats, and events and whole objects are the same response."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facade.translate.answers import Head
from facade.translate.query import read_input_items_query, read_retrieve_query
from facade.translate.response_answers import (
    Building,
    ResponseStream,
    WholeResponse,
    beginning,
    replayed,
)
from facade.translate.response_items import with_ids
from facade.translate.response_request import call_of, read_response
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

HEAD = Head("resp_t", 7, "tiny")
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
DONE = llm_pb2.Done(usage=llm_pb2.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=6, reasoning_tokens=2))
STOP, LENGTH = llm_pb2.FINISH_REASON_STOP, llm_pb2.FINISH_REASON_LENGTH


def asked(**fields):
    return read_response({"input": "Hello", **fields})[0]


def chat(past=(), **fields) -> llm_pb2.ChatRequest:
    (request,) = call_of(asked(**fields), past).requests
    return request


def said(request):
    return [(message.role, "".join(part.text for part in message.content)) for message in request.messages]


def test_a_text_is_what_the_user_says_and_instructions_come_first():
    request = chat(instructions="Be kind.", max_output_tokens=9, temperature=0.5, top_p=0.75)
    assert said(request) == [("system", "Be kind."), ("user", "Hello")]
    assert request.options.limits.max_tokens == 9
    assert (request.options.sampling.temperature, request.options.sampling.top_p) == (0.5, 0.75)


def test_what_the_model_said_in_a_row_is_one_turn():
    request = chat(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "assistant", "content": "So so."},
            {"role": "user", "content": "Thanks"},
        ]
    )
    assert said(request) == [
        ("user", "Weather?"),
        ("assistant", "I look."),
        ("tool", "sun"),
        ("tool", "rain"),
        ("assistant", "So so."),
        ("user", "Thanks"),
    ]
    assert request.messages[1].reasoning == "hm"
    assert [call.id for call in request.messages[1].tool_calls] == ["c1", "c2"]
    assert [message.tool_call_id for message in request.messages[2:4]] == ["c1", "c2"]


def test_past_items_come_between_instructions_and_input():
    past = with_ids(asked(input="Before").items, "p")
    assert said(chat(past, instructions="i")) == [("system", "i"), ("user", "Before"), ("user", "Hello")]


def test_options_tools_and_forms_are_mapped():
    request = chat(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "none", "summary": "auto"},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        metadata={"a": "b"},
    )
    assert (request.tool_choice.kind, request.tool_choice.name) == (llm_pb2.ToolChoice.KIND_NAMED, "weather")
    assert not request.tool_choice.parallel
    assert json.loads(request.options.structure.json_schema.schema_json) == {"type": "object"}
    assert (request.options.logprobs, request.options.top_logprobs) == (True, 3)
    assert request.HasField("enable_thinking")
    assert not request.enable_thinking
    allowed = chat(
        tools=[TOOL, {**TOOL, "name": "other"}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]},
    )
    assert [tool.name for tool in allowed.tools] == ["other"]
    assert allowed.tool_choice.kind == llm_pb2.ToolChoice.KIND_REQUIRED


def test_what_llm_refuses_is_told_by_the_callers_places():
    names = call_of(asked(instructions="i"), [{"type": "message", "role": "user", "content": []}]).names
    assert names.of("messages[0]") == "instructions"
    assert names.of("messages[1].content") == "previous_response_id"
    assert names.of("messages[2].content[0].media") == "input[0].content[0]"
    assert names.of("prompt") == "input"
    assert names.of("options.limits.max_tokens") == "max_output_tokens"


def items(*each):
    return {"input": list(each)}


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        (items(7), "input[0]"),
        (items({"role": "wizard", "content": "x"}), "input[0].role"),
        (items({"role": "user"}), "input[0].content"),
        (items({"role": "user", "content": []}), "input[0].content"),
        (items({"role": "user", "content": [{"type": "output_text", "text": "x"}]}), "input[0].content[0].type"),
        (items({"role": "user", "content": [{"type": "input_file"}]}), "input[0].content[0].type"),
        (
            items({"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}),
            "input[0].content[0].image_url",
        ),
        (items({"type": "item_reference", "id": "x"}), "input[0].type"),
        (items({"type": "function_call", "call_id": "x"}), "input[0].name"),
        (items({"type": "function_call_output", "output": "x"}), "input[0].call_id"),
        (items({"type": "function_call_output", "call_id": "x", "output": 7}), "input[0].output"),
        (items({**USER, "id": "a b"}), "input[0].id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"include": ["everything"]}, "include[0]"),
        ({"stream_options": {}}, "stream_options"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_every_malformed_field_is_named(fields, at_fault):
    with pytest.raises(DomainError) as refused:
        read_response({"input": "Hello", **fields})
    assert refused.value.field == at_fault
    assert at_fault in refused.value.message


@pytest.mark.parametrize(("given", "drops"), [("auto", True), ("disabled", False), (None, False)])
def test_the_oldest_turns_may_be_left_out_only_if_the_caller_says_so(given, drops):
    body = asked(truncation=given)
    (request,) = call_of(body, ()).requests
    assert request.drop_oldest is drops
    assert beginning(body, HEAD)["truncation"] == (given or "disabled")


def test_items_without_an_id_get_one_and_no_two_are_the_same():
    found = with_ids(asked(**items(USER, {**USER, "id": "mine"}, {**USER, "id": "mine"})).items, "t")
    assert [item["id"] for item in found] == ["msg_t_i0", "mine", "msg_t_i2"]


def play(*deltas, finish, **fields):
    """The response as one object, and as its events."""
    body = asked(**fields)
    whole, streamed = (Building(beginning(body, HEAD), "t", lambda: 9.5) for _ in range(2))
    collector, stream = WholeResponse(whole), ResponseStream(streamed)
    raw = b""
    for delta in [*deltas, {"finish_reason": finish}]:
        output = llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(**delta)])
        collector.output(0, output)
        raw += stream.output(0, output)
    collector.done(0, DONE)
    raw += stream.done(0, DONE) + stream.end()
    return whole.response, parsed(raw)


def parsed(raw, first=0):
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def test_the_events_of_a_text_come_in_openais_order():
    response, events = play({"text": "Hel"}, {"text": "lo"}, finish=STOP)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-1]["response"] == response
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert events[0]["response"]["output"] == []
    assert (response["status"], response["completed_at"]) == ("completed", 9)
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_thoughts_and_calls_are_items_of_their_own():
    call = llm_pb2.ToolCallDelta(index=0, id="c1", name="weather", arguments_json='{"a":')
    more = llm_pb2.ToolCallDelta(index=0, arguments_json="1}")
    other = llm_pb2.ToolCallDelta(index=1, id="c2", name="weather", arguments_json="{}")
    response, events = play(
        {"reasoning": "hm"},
        {"tool_calls": [call]},
        {"tool_calls": [more, other]},
        finish=llm_pb2.FINISH_REASON_TOOL_CALLS,
        tools=[TOOL],
    )
    reasoning, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (first["call_id"], first["arguments"], second["arguments"]) == ("c1", '{"a":1}', "{}")
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["output_index"], event["arguments"]) for event in done] == [(1, '{"a":1}'), (2, "{}")]
    assert response["status"] == "completed"


def test_an_answer_that_was_cut_is_incomplete():
    response, events = play({"text": "x"}, finish=LENGTH)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


def test_an_answer_of_nothing_is_an_empty_message():
    response, _ = play(finish=STOP)
    assert response["output"][0]["content"][0]["text"] == ""


def test_a_failure_says_so_and_ends_with_an_error():
    building = Building(beginning(asked(), HEAD), "t", lambda: 0.0)
    stream = ResponseStream(building)
    raw = stream.output(0, llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(text="x")]))
    told = {"error": {"type": "server_error", "message": "No.", "code": "engine_failed", "param": None, "status": 500}}
    events = parsed(raw + stream.failed(told))
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert events[-2]["response"]["error"] == {"code": "server_error", "message": "No."}
    assert (events[-1]["message"], events[-1]["code"]) == ("No.", "engine_failed")


def test_an_answer_without_an_end_is_no_response():
    building = Building(beginning(asked(), HEAD), "t", lambda: 0.0)
    building.gain(llm_pb2.ChoiceDelta(text="x"))
    with pytest.raises(DomainError) as refused:
        building.finish(DONE)
    assert refused.value.reason is Reason.ENGINE_FAILED


pieces = st.sampled_from(
    [
        {"text": "a\n"},
        {"reasoning": "b"},
        {"text": "c", "reasoning": "d"},
        {"tool_calls": [llm_pb2.ToolCallDelta(index=0, id="c0", name="f", arguments_json="{}")]},
        {},
    ]
)


@given(st.lists(pieces, max_size=8), st.sampled_from([STOP, LENGTH]))
def test_a_kept_response_is_told_again_as_it_was_made(deltas, finish):
    response, events = play(*deltas, finish=finish)
    again = parsed(replayed(json.loads(json.dumps(response)), after=-1))
    assert again[-1]["response"] == response == events[-1]["response"]
    merged = [event for event in events if not event["type"].endswith(".delta")]
    replay = [event for event in again if not event["type"].endswith(".delta")]
    assert [{**event, "sequence_number": 0} for event in merged] == [
        {**event, "sequence_number": 0} for event in replay
    ]
    later = parsed(replayed(response, after=1), first=2)
    assert later == again[2:]


def test_queries_are_checked_like_bodies():
    assert read_retrieve_query([("stream", "true"), ("starting_after", "3")]).starting_after == 3
    assert not read_retrieve_query([("include[]", "x")]).stream
    page = read_input_items_query([("limit", "5"), ("order", "asc"), ("after", "x")])
    assert (page.limit, page.ascending, page.after) == (5, True, "x")
    for read, query, at_fault in (
        (read_retrieve_query, [("stream", "yes")], "stream"),
        (read_retrieve_query, [("starting_after", "3")], "starting_after"),
        (read_input_items_query, [("limit", "0")], "limit"),
        (read_input_items_query, [("limit", "x")], "limit"),
        (read_input_items_query, [("order", "up")], "order"),
        (read_input_items_query, [("unknown", "1")], "unknown"),
    ):
        with pytest.raises(DomainError) as refused:
            read(query)
        assert refused.value.field == at_fault
