"""Requests in OpenAI's JSON: what they become, and how they are refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facade.translate.body import parse_object
from facade.translate.chat import CHAT, read_chat
from facade.translate.completion import COMPLETION, read_completion
from facade.translate.tokens import DETOKENIZE, TOKENIZE, read_detokenize, read_tokenize
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason
from tests.fixtures.amounts import amount

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def refused(read, body) -> DomainError:
    with pytest.raises(DomainError) as raised:
        read(body)
    return raised.value


def outcome(read, body):
    """Return what was read, or the refusal."""
    try:
        return read(body)
    except DomainError as error:
        return error


BODIES = {
    "empty": (b"", "invalid_json"),
    "blank": (b" \n ", "invalid_json"),
    "cut off": (b'{"a": [', "invalid_json"),
    "an array": (b"[]", "invalid_type"),
    "null": (b"null", "invalid_type"),
    "a text": (b'"x"', "invalid_type"),
    "no UTF-8": (b'{"a": "\xff"}', "invalid_json"),
    "half a surrogate pair": (b'{"a": "\\ud800"}', "invalid_json"),
    "two objects": (b"{}{}", "invalid_json"),
    "nested without end": (b'{"a":' + b"[" * 100_000, "invalid_json"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_json_object_is_refused(name):
    body, code = BODIES[name]
    error = refused(parse_object, body)
    assert error.reason is Reason.INVALID_REQUEST
    assert error.metadata["code"] == code
    assert error.field == "body"


@pytest.mark.parametrize(
    ("body", "field"),
    [(b'{"temperature": NaN}', "temperature"), (b'{"a": {"b": [1, -Infinity]}}', "a.b[1]"), (b"NaN", "body")],
)
def test_a_number_that_json_does_not_have_is_refused_by_its_place(body, field):
    error = refused(parse_object, body)
    assert error.field == field
    assert "finite" in error.message


CHAT_REFUSALS = {
    "no messages": ({"messages": None}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages as a text": ({"messages": "hi"}, "messages"),
    "a message as a text": ({"messages": ["hi"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0].role"),
    "a role nobody knows": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "content as a number": ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    "a part nobody knows": (
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "messages[0].content[0].type",
    ),
    "an image from elsewhere": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    "a tool's answer to nothing": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    "a field nobody knows": ({"temprature": 1}, "temprature"),
    "a model as a number": ({"model": 7}, "model"),
    "an empty model": ({"model": ""}, "model"),
    "a hot temperature": ({"temperature": 2.1}, "temperature"),
    "a temperature as a text": ({"temperature": "hot"}, "temperature"),
    "a temperature as a boolean": ({"temperature": True}, "temperature"),
    "no tokens at all": ({"max_tokens": 0}, "max_tokens"),
    "tokens without end": ({"max_tokens": 10**30}, "max_tokens"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "two limits": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    "too many choices": ({"n": 17}, "n"),
    "an empty stop": ({"stop": ""}, "stop"),
    "too many stops": ({"stop": ["x"] * 17}, "stop"),
    "a stop as a number": ({"stop": ["x", 7]}, "stop[1]"),
    "a bias by name": ({"logit_bias": {"cat": 1}}, "logit_bias.cat"),
    "a strong bias": ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "stream options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "alternatives without logprobs": ({"top_logprobs": 3}, "top_logprobs"),
    "a format nobody knows": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "a schema for no format": ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    "two schemas": ({"response_format": {"type": "json_object"}, "json_schema": {}}, "json_schema"),
    "a schema and a grammar": ({"json_schema": {}, "grammar": "root ::= [a-z]"}, "grammar"),
    "a schema that is missing": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of a tool that is not there": (
        {
            "tools": [{"type": "function", "function": {"name": "a"}}],
            "tool_choice": {"type": "function", "function": {"name": "b"}},
        },
        "tool_choice.function.name",
    ),
    "old functions": ({"functions": []}, "functions"),
    "sound": ({"modalities": ["audio"]}, "modalities"),
    "a question to be continued": ({"continue_final_message": True}, "continue_final_message"),
    "a question without an answer": ({"add_generation_prompt": False}, "add_generation_prompt"),
    "both ends": ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
}


@pytest.mark.parametrize("name", CHAT_REFUSALS)
def test_a_bad_chat_is_refused_by_the_name_of_its_field(name):
    fields, field = CHAT_REFUSALS[name]
    error = refused(read_chat, HELLO | fields)
    assert error.field == field
    assert f"'{field}'" in error.message
    assert error.reason in (Reason.INVALID_REQUEST, Reason.UNSUPPORTED)


COMPLETION_REFUSALS = {
    "no prompt": ({}, "prompt"),
    "a prompt as an object": ({"prompt": {"a": 1}}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "a negative token": ({"prompt": [1, -2]}, "prompt[1]"),
    "a token as a text": ({"prompt": [[1], ["x"]]}, "prompt[1][0]"),
    "too many answers": ({"prompt": ["x"] * 64, "n": 16}, "prompt"),
    "the best of more": ({"prompt": "x", "best_of": 3}, "best_of"),
    "too many alternatives": ({"prompt": "x", "logprobs": 21}, "logprobs"),
}


ANSWER_BEGUN = {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Hel"}]}


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        (ANSWER_BEGUN, {"continue_final_message": True}),
        (ANSWER_BEGUN, {"continue_final_message": True, "add_generation_prompt": False}),
        (HELLO, {"continue_final_message": False, "add_generation_prompt": True}),
    ],
)
def test_a_caller_may_say_how_the_prompt_ends_if_it_ends_so(body, ends):
    assert read_chat(body | ends) == read_chat(body)


@pytest.mark.parametrize("ends", [{"continue_final_message": False}, {"add_generation_prompt": True}])
def test_an_answer_that_has_begun_is_never_left_behind(ends):
    assert refused(read_chat, ANSWER_BEGUN | ends).field in ends


@pytest.mark.parametrize("name", COMPLETION_REFUSALS)
def test_a_bad_completion_is_refused_by_the_name_of_its_field(name):
    body, field = COMPLETION_REFUSALS[name]
    assert refused(read_completion, body).field == field


TOKEN_REFUSALS = {
    "nothing to split": (read_tokenize, {}, "text"),
    "two things to split": (read_tokenize, {"text": "x", "messages": HELLO["messages"]}, "messages"),
    "a text as a number": (read_tokenize, {"text": 7}, "text"),
    "no tokens": (read_detokenize, {}, "tokens"),
    "tokens as a text": (read_detokenize, {"tokens": "x"}, "tokens"),
    "a token as a text": (read_detokenize, {"tokens": ["x"]}, "tokens[0]"),
}


@pytest.mark.parametrize("name", TOKEN_REFUSALS)
def test_bad_tokens_are_refused_by_the_name_of_their_field(name):
    read, body, field = TOKEN_REFUSALS[name]
    assert refused(read, body).field == field


def test_an_unknown_field_is_refused_with_the_nearest_known_one():
    assert "'temperature'" in refused(read_chat, HELLO | {"temprature": 1}).message


def test_null_means_absent():
    nothing = {name: None for name in CHAT.fields if name != "messages"}
    assert read_chat(HELLO | nothing).requests == read_chat(HELLO).requests


def test_a_chat_becomes_the_contracts_request():
    call = read_chat(
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": "Hello", "name": "Ann"},
            ],
            "temperature": 0,
            "seed": 2**40 + 1,
            "stop": "END",
            "max_completion_tokens": 9,
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_object"},
            "logit_bias": {"50": -100},
            "reasoning_effort": "none",
            "user": "ann",
        }
    )
    (request,) = call.requests
    assert (call.model, call.choices, call.stream, call.include_usage) == ("tiny", 2, True, True)
    assert [message.content[0].text for message in request.messages] == ["Be brief.", "Hello"]
    assert request.messages[1].name == "Ann"
    options = request.options
    assert options.sampling.HasField("temperature")
    assert options.sampling.temperature == 0
    assert options.sampling.seed < 2**32
    assert list(options.limits.stop) == ["END"]
    assert (options.limits.max_tokens, options.n) == (9, 2)
    assert options.structure.HasField("json_object")
    assert dict(options.sampling.logit_bias) == {50: -100}
    assert request.enable_thinking is False


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object", "schema": {"const": 4}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 4}}}},
        {"json_schema": {"const": 4}},
    ],
)
def test_a_schema_may_stand_where_llama_server_has_it(asked):
    for call in (read_chat({**HELLO, **asked}), read_completion({"prompt": "x", **asked})):
        assert call.requests[0].options.structure.json_schema.schema_json == '{"const":4}'
        place = call.names.of("options.structure.json_schema.schema_json.const")
        assert place == "response_format.json_schema.schema.const" or place in {
            "response_format.schema.const",
            "json_schema.const",
        }
        assert place.split(".")[0] in asked


def test_the_description_tells_messages_apart_by_their_roles():
    forms = CHAT.schema()["properties"]["messages"]["items"]["oneOf"]
    required = {role: set(form["required"]) for form in forms for role in form["properties"]["role"]["enum"]}
    assert required == {
        **{role: {"role", "content"} for role in ("system", "developer", "user")},
        "assistant": {"role"},
        "tool": {"role", "content", "tool_call_id"},
    }


def test_an_answer_of_ours_may_be_sent_back_as_it_was_received():
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    message = read_chat({"messages": [HELLO["messages"][0], answer]}).requests[0].messages[1]
    assert message.tool_calls[0].name == "f"
    assert message.reasoning == "hm"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", [llm_pb2.Prompt(text="x")]),
        (["x", "y"], [llm_pb2.Prompt(text="x"), llm_pb2.Prompt(text="y")]),
        ([1, 2], [llm_pb2.Prompt(tokens=llm_pb2.Tokens(ids=[1, 2]))]),
        ([[1], [2]], [llm_pb2.Prompt(tokens=llm_pb2.Tokens(ids=[each])) for each in (1, 2)]),
    ],
)
def test_prompts_come_as_texts_or_tokens_one_or_many(prompt, expected):
    call = read_completion({"prompt": prompt})
    assert [request.prompt for request in call.requests] == expected
    assert all(request.options.limits.max_tokens == 16 for request in call.requests)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
READERS = {
    "chat": (read_chat, CHAT),
    "completion": (read_completion, COMPLETION),
    "tokenize": (read_tokenize, TOKENIZE),
    "detokenize": (read_detokenize, DETOKENIZE),
}


@pytest.mark.parametrize("name", READERS)
def test_any_json_gives_a_request_or_a_refusal_that_names_a_field(name):
    read, known = READERS[name]
    fields = st.sampled_from(sorted(known.fields))

    @settings(max_examples=amount(80, thorough=300), deadline=None)
    @given(st.dictionaries(fields, json_values, max_size=6))
    def check(body):
        result = outcome(read, body)
        if isinstance(result, DomainError):
            assert result.field
            assert result.reason in (Reason.INVALID_REQUEST, Reason.UNSUPPORTED)
            return
        message = result[0] if isinstance(result, tuple) else result
        for request in getattr(message, "requests", [message]):
            request.SerializeToString()

    check()


@settings(max_examples=amount(80, thorough=300), deadline=None)
@given(json_values)
def test_any_message_gives_a_turn_or_a_refusal_that_names_it(message):
    result = outcome(read_chat, {"messages": [message]})
    assert not isinstance(result, DomainError) or result.field.startswith("messages[0]")


@settings(max_examples=amount(80, thorough=300), deadline=None)
@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_give_an_object_or_a_refusal(body):
    result = outcome(parse_object, body)
    assert isinstance(result, dict) or result.reason is Reason.INVALID_REQUEST


def test_adapters_are_asked_for_by_name_or_as_llama_server_has_it_by_place():
    (named,) = read_chat(HELLO | {"adapters": [{"name": "pirate", "scale": 0.5}, {"name": "poet"}]}).requests
    assert list(named.options.adapters) == [llm_pb2.Adapter(name="pirate", scale=0.5), llm_pb2.Adapter(name="poet")]
    (placed,) = read_chat(HELLO | {"lora": [{"id": 1, "scale": 0.5}, {"id": 0}]}).requests
    assert list(placed.options.adapters) == [llm_pb2.Adapter(name="1", scale=0.5), llm_pb2.Adapter(name="0")]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"lora": [{"id": -1}]}, "lora[0].id"),
        ({"lora": [{"scale": 1}]}, "lora[0].id"),
        ({"lora": [{"id": 0, "scale": 17}]}, "lora[0].scale"),
        ({"lora": {"id": 0}}, "lora"),
        ({"lora": [{"id": n} for n in range(9)]}, "lora"),
        ({"lora": [], "adapters": []}, "lora"),
        ({"adapters": [{"name": ""}]}, "adapters[0].name"),
    ],
)
def test_a_bad_adapter_is_named_by_its_place(fields, field):
    assert refused(read_chat, HELLO | fields).field == field
