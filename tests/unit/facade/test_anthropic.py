"""Anthropic's messages: bodies become chats, answers become blocks, and a stream is its exact sequence of events."""

import base64
import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from facade.errors import error_object
from facade.translate.answers import Head
from facade.translate.anthropic import read_count_tokens, read_messages
from facade.translate.anthropic_answers import MessageStream, WholeMessage, anthropic_error
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

HEAD = Head("msg_1", 1, "tiny")
HELLO = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "weather", "description": "Tells it", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"p").decode()},
}
END = llm_pb2.Done(usage=llm_pb2.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=6))


def chat(**fields) -> llm_pb2.ChatRequest:
    (request,) = read_messages({**HELLO, **fields}).requests
    assert isinstance(request, llm_pb2.ChatRequest)
    return request


def said(request):
    return [(message.role, "".join(part.text for part in message.content)) for message in request.messages]


def test_the_system_message_comes_first_as_text_or_blocks():
    assert said(chat(system="Be kind.")) == [("system", "Be kind."), ("user", "Hello")]
    blocks = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "kind."},
    ]
    assert said(chat(system=blocks)) == [("system", "Be kind."), ("user", "Hello")]


def test_options_are_mapped():
    request = chat(stop_sequences=["a", "b"], temperature=0.5, top_k=3, top_p=0.75, thinking={"type": "disabled"})
    limits, sampling = request.options.limits, request.options.sampling
    assert (limits.max_tokens, list(limits.stop)) == (9, ["a", "b"])
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.75)
    assert request.HasField("enable_thinking")
    assert not request.enable_thinking
    assert chat(thinking={"type": "enabled", "budget_tokens": 1024}).enable_thinking
    assert not chat(thinking={"type": "adaptive"}).HasField("enable_thinking")


def test_a_round_of_tools_becomes_calls_and_answers():
    request = chat(
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                    {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "x"}],
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    )
    assert said(request) == [
        ("user", "Weather?"),
        ("assistant", "I look."),
        ("tool", "sun"),
        ("tool", "Error: x"),
        ("user", "And?"),
    ]
    assistant = request.messages[1]
    assert assistant.reasoning == "hm"
    assert [(call.id, call.name, call.arguments_json) for call in assistant.tool_calls] == [
        ("t1", "weather", '{"city":"Paris"}'),
        ("t2", "weather", "{}"),
    ]
    assert [message.tool_call_id for message in request.messages[2:4]] == ["t1", "t2"]
    assert (request.tools[0].name, request.tools[0].description) == ("weather", "Tells it")
    assert (request.tool_choice.kind, request.tool_choice.name) == (llm_pb2.ToolChoice.KIND_NAMED, "weather")
    assert not request.tool_choice.parallel


@pytest.mark.parametrize(
    ("kind", "mapped"),
    [
        ("auto", llm_pb2.ToolChoice.KIND_AUTO),
        ("any", llm_pb2.ToolChoice.KIND_REQUIRED),
        ("none", llm_pb2.ToolChoice.KIND_NONE),
    ],
)
def test_each_choice_of_tools_is_mapped(kind, mapped):
    assert chat(tools=[TOOL], tool_choice={"type": kind}).tool_choice.kind == mapped


def test_an_answers_form_becomes_a_structure():
    request = chat(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"})
    assert json.loads(request.options.structure.json_schema.schema_json) == {"type": "object"}
    assert request.template_variables["reasoning_effort"] == "low"


def test_what_llm_refuses_is_told_by_the_callers_places():
    call = read_messages(
        {**HELLO, "system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}
    )
    assert call.requests[0].messages[1].content[1].media.data == b"p"
    assert call.names.of("messages[1].content[1].media") == "messages[0].content[1]"
    assert call.names.of("messages[0].content[0]") == "system"
    assert call.names.of("options.limits.stop[1]") == "stop_sequences[1]"
    assert call.names.of("prompt") == "messages"


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user(), "messages[0].content"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "magic"}), "messages[0].content[0].type"),
        (user({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "image", "source": {"type": "url", "url": "http://x"}}), "messages[0].content[0].source.type"),
        (user({**IMAGE, "source": {**IMAGE["source"], "data": "%"}}), "messages[0].content[0].source.data"),
        (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (user({"type": "tool_use", "id": "x", "name": "x", "input": {}}), "messages[0].content[0].type"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
def test_every_malformed_field_is_named(fields, at_fault):
    with pytest.raises(DomainError) as refused:
        read_messages({**HELLO, **fields})
    assert refused.value.field == at_fault
    assert at_fault in refused.value.message


def test_counting_takes_no_limit_of_tokens():
    request, _ = read_count_tokens({"messages": HELLO["messages"], "system": "s"})
    assert said(request.chat) == [("system", "s"), ("user", "Hello")]
    with pytest.raises(DomainError):
        read_count_tokens(HELLO)


def play(*deltas, finish):
    whole, stream = WholeMessage(HEAD), MessageStream(HEAD)
    raw = b""
    for delta in [*deltas, {"finish_reason": finish} if isinstance(finish, int) else finish]:
        output = llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(**delta)])
        whole.output(0, output)
        raw += stream.output(0, output)
    whole.done(0, END)
    raw += stream.done(0, END) + stream.end()
    return whole.result(), parsed(raw)


def parsed(raw):
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def rebuilt(events):
    """The message as a client puts it together."""
    message, arguments = None, {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def test_the_events_of_a_text_come_in_anthropics_order():
    message, events = play({"text": "Hel"}, {"text": "lo"}, finish=llm_pb2.FINISH_REASON_STOP)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 6,
        },
    }
    assert rebuilt(events) == message


def test_thoughts_text_and_calls_are_blocks_one_after_the_other():
    call = llm_pb2.ToolCallDelta(index=0, id="t1", name="weather", arguments_json='{"city":')
    more = llm_pb2.ToolCallDelta(index=0, arguments_json='"Paris"}')
    other = llm_pb2.ToolCallDelta(index=1, id="t2", name="weather", arguments_json="{}")
    message, events = play(
        {"reasoning": "h"},
        {"reasoning": "m", "text": "I look."},
        {"tool_calls": [call]},
        {"tool_calls": [more, other]},
        finish=llm_pb2.FINISH_REASON_TOOL_CALLS,
    )
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][2]["input"] == {"city": "Paris"}
    assert message["stop_reason"] == "tool_use"
    assert rebuilt(events) == message
    assert [event["type"] for event in events].count("ping") == 1


@given(st.lists(st.sampled_from([{"text": "a\n"}, {"reasoning": "b"}, {}]), max_size=8))
def test_every_block_that_opens_is_closed_before_the_next(deltas):
    _, events = play(*deltas, finish=llm_pb2.FINISH_REASON_LENGTH)
    opened = []
    for event in events:
        if event["type"] == "content_block_start":
            opened.append(event["index"])
        elif event["type"].startswith("content_block"):
            assert opened[-1] == event["index"]
    assert opened == list(range(len(opened)))
    assert [event["type"] for event in events].count("content_block_stop") == len(opened) >= 1
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_told():
    end = {"finish_reason": llm_pb2.FINISH_REASON_STOP, "stop_string": "END"}
    message, _ = play({"text": "x"}, finish=end)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_an_answer_without_an_end_is_no_message():
    stream = MessageStream(HEAD)
    stream.output(0, llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(text="x")]))
    with pytest.raises(DomainError):
        stream.done(0, END)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.INVALID_REQUEST, "invalid_request_error"),
        (Reason.UNAUTHENTICATED, "authentication_error"),
        (Reason.FORBIDDEN_TIER, "permission_error"),
        (Reason.NOT_FOUND, "not_found_error"),
        (Reason.TOO_LARGE, "request_too_large"),
        (Reason.QUEUE_FULL, "rate_limit_error"),
        (Reason.LOADING, "overloaded_error"),
        (Reason.INTERNAL, "api_error"),
    ],
)
def test_errors_have_anthropics_types(reason, kind):
    told = anthropic_error(error_object(DomainError(reason, "No."), "r1"))
    assert (told["type"], told["error"]["type"], told["error"]["message"], told["request_id"]) == (
        "error",
        kind,
        "No.",
        "r1",
    )
    event = MessageStream(HEAD).failed(error_object(DomainError(reason, "No."), "r1"))
    assert event.startswith(b"event: error\ndata: ")
    assert orjson.loads(event.split(b"data: ")[1]) == told
