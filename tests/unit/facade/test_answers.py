"""Answers: chunks of a stream and whole objects say the same, and failures speak of the caller's fields."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from facade.translate.answers import Head, usage_object
from facade.translate.failures import CHAT_NAMES, OWN_NAMES, Names, Place, as_rest, error_of, rest_field
from facade.translate.stream import DONE, ChatStream, CompletionStream
from facade.translate.whole import WholeChat, WholeCompletion
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

HEAD = Head("chatcmpl-1", 1_700_000_000, 'a "model"', choices=2)
ONE = Head("chatcmpl-1", 1_700_000_000, "a", choices=1)
STOP = llm_pb2.ChoiceDelta(finish_reason=llm_pb2.FINISH_REASON_STOP)
END = llm_pb2.Done(usage=llm_pb2.Usage(prompt_tokens=4, completion_tokens=6, cached_tokens=1, reasoning_tokens=2))


def output(*deltas: llm_pb2.ChoiceDelta) -> llm_pb2.Output:
    return llm_pb2.Output(choices=deltas)


def events(raw: bytes) -> list[dict]:
    assert raw.endswith(b"\n\n") or not raw
    return [json.loads(line.removeprefix(b"data: ")) for line in raw.split(b"\n\n") if line and line + b"\n\n" != DONE]


deltas = st.builds(
    llm_pb2.ChoiceDelta,
    index=st.integers(0, 1),
    text=st.text(max_size=12),
    reasoning=st.sampled_from(["", "hm\n"]),
    logprobs=st.just([])
    | st.builds(lambda text: [llm_pb2.TokenLogprob(token=text, raw=text.encode(), logprob=-1)], st.text(max_size=3)),
)


@given(st.lists(deltas, max_size=12))
def test_a_streamed_chat_says_what_a_whole_one_says(pieces):
    stream, whole = ChatStream(HEAD, include_usage=True), WholeChat(HEAD)
    ends = [llm_pb2.ChoiceDelta(index=index, finish_reason=llm_pb2.FINISH_REASON_LENGTH) for index in (0, 1)]
    raw = b""
    for piece in [*pieces, *ends]:
        raw += stream.output(0, output(piece))
        whole.output(0, output(piece))
    raw += stream.done(0, END) + stream.end()
    whole.done(0, END)
    assert raw.endswith(DONE)
    told = {0: ["", "", [], None], 1: ["", "", [], None]}
    for event in events(raw):
        assert (event["id"], event["created"], event["model"]) == (HEAD.id, HEAD.created, HEAD.model)
        for choice in event["choices"]:
            mine = told[choice["index"]]
            mine[0] += choice["delta"].get("content", "")
            mine[1] += choice["delta"].get("reasoning_content", "")
            mine[2] += (choice["logprobs"] or {"content": []})["content"]
            mine[3] = choice["finish_reason"] or mine[3]
    result = whole.result()
    for choice in result["choices"]:
        message = choice["message"]
        logprobs = (choice["logprobs"] or {"content": []})["content"]
        expected = [message["content"], message.get("reasoning_content", ""), logprobs, choice["finish_reason"]]
        assert told[choice["index"]] == expected
    assert events(raw)[-1]["usage"] == result["usage"]


@given(st.lists(st.tuples(st.integers(0, 2), deltas), max_size=12))
def test_streamed_completions_say_what_whole_ones_say(pieces):
    stream, whole = CompletionStream(HEAD, include_usage=False), WholeCompletion(HEAD)
    raw = b""
    for prompt, piece in pieces:
        raw += stream.output(prompt, output(piece))
        whole.output(prompt, output(piece))
    ends = output(*(llm_pb2.ChoiceDelta(index=each, finish_reason=llm_pb2.FINISH_REASON_STOP) for each in (0, 1)))
    for prompt in range(3):
        raw += stream.output(prompt, ends)
        whole.output(prompt, ends)
        raw += stream.done(prompt, END)
        whole.done(prompt, END)
    texts: dict[int, str] = {}
    for event in events(raw + stream.end()):
        assert "usage" not in event
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {each["index"]: each["text"] for each in whole.result()["choices"]}
    assert whole.result()["usage"]["total_tokens"] == 30


def test_the_role_comes_first_and_the_finish_reason_only_with_the_end():
    stream = ChatStream(ONE, include_usage=False)
    first = events(stream.output(0, output(llm_pb2.ChoiceDelta(text="x", finish_reason=llm_pb2.FINISH_REASON_STOP))))
    assert first[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [event["choices"][0]["finish_reason"] for event in first] == [None, None]
    assert [event["choices"][0]["finish_reason"] for event in events(stream.done(0, END))] == ["stop"]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (llm_pb2.FINISH_REASON_STOP, "stop"),
        (llm_pb2.FINISH_REASON_LENGTH, "length"),
        (llm_pb2.FINISH_REASON_TOOL_CALLS, "tool_calls"),
        (llm_pb2.FINISH_REASON_MIN_PROBABILITY, "stop"),
    ],
)
def test_every_finish_reason_has_openais_word(reason, word):
    stream = ChatStream(ONE, include_usage=False)
    stream.output(0, output(llm_pb2.ChoiceDelta(finish_reason=reason)))
    assert events(stream.done(0, END))[0]["choices"][0]["finish_reason"] == word


def test_tool_calls_are_told_in_pieces_and_collected_whole():
    pieces = [
        llm_pb2.ToolCallDelta(index=0, id="c", name="f", arguments_json='{"a":'),
        llm_pb2.ToolCallDelta(index=0, arguments_json="1}"),
    ]
    stream, whole = ChatStream(HEAD, include_usage=False), WholeChat(HEAD)
    told = []
    for piece in pieces:
        gained = output(llm_pb2.ChoiceDelta(tool_calls=[piece]))
        told += [event["choices"][0]["delta"].get("tool_calls") for event in events(stream.output(0, gained))]
        whole.output(0, gained)
    assert told[1:] == [
        [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
    ]
    message = whole.result()["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]


def test_logprobs_of_an_echoed_completion_begin_after_the_prompt():
    whole = WholeCompletion(HEAD)
    whole.output(0, output(llm_pb2.ChoiceDelta(text="prompt")))
    logprob = llm_pb2.TokenLogprob(token="ab", logprob=-1)
    whole.output(0, output(llm_pb2.ChoiceDelta(text="abab", logprobs=[logprob, logprob])))
    assert whole.result()["choices"][0]["logprobs"]["text_offset"] == [6, 8]


def test_an_echoed_prompt_s_first_token_has_no_probability_and_the_others_have_theirs():
    whole = WholeCompletion(HEAD)
    first, second = (
        llm_pb2.TokenLogprob(token="pro", first=True),
        llm_pb2.TokenLogprob(token="mpt", logprob=-2, top=[llm_pb2.TokenLogprob(token="x", logprob=-1)]),
    )
    whole.output(0, output(llm_pb2.ChoiceDelta(text="prompt", logprobs=[first, second])))
    whole.output(0, output(llm_pb2.ChoiceDelta(text="!", logprobs=[llm_pb2.TokenLogprob(token="!", logprob=-3)])))
    assert whole.result()["choices"][0]["logprobs"] == {
        "tokens": ["pro", "mpt", "!"],
        "token_logprobs": [None, -2, -3],
        "top_logprobs": [None, {"x": -1}, {}],
        "text_offset": [0, 3, 6],
    }


@pytest.mark.parametrize("collector", [ChatStream, CompletionStream, WholeChat, WholeCompletion])
@pytest.mark.parametrize("said", [[], [STOP]], ids=["no choice ended", "one of two ended"])
def test_a_done_before_every_choice_has_ended_is_a_failure_and_no_end(collector, said):
    options = {"include_usage": False} if collector in (ChatStream, CompletionStream) else {}
    answer = collector(HEAD, **options)
    answer.output(0, output(llm_pb2.ChoiceDelta(index=1, text="x"), *said))
    with pytest.raises(DomainError) as failed:
        answer.done(0, END)
    assert failed.value.reason is Reason.ENGINE_FAILED
    assert f"{2 - len(said)} of 2" in failed.value.message


@pytest.mark.parametrize("collector", [WholeChat, WholeCompletion])
def test_a_probability_of_zero_is_told_as_a_number_that_json_has(collector):
    nothing = llm_pb2.TokenLogprob(token="a", logprob=float("-inf"))
    token = llm_pb2.TokenLogprob(token="b", logprob=-0.5, top=[nothing])
    answer = collector(ONE)
    answer.output(0, output(llm_pb2.ChoiceDelta(text="ab", logprobs=[nothing, token]), STOP))
    told = json.loads(orjson.dumps(answer.result()["choices"][0]["logprobs"]))
    assert "-9999.0" in json.dumps(told)
    assert "null" not in json.dumps({**told, "refusal": 0})


def test_the_saving_of_the_prefix_cache_is_told_in_openais_place_and_in_ours():
    usage = usage_object([END.usage, END.usage])
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["cached_prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("options.sampling.top_k", "top_k"),
        ("options.limits.stop[2]", "stop[2]"),
        ("options.n", "n"),
        ("prompt.tokens.ids[4]", "prompt[4]"),
        ("prompt.text", "prompt"),
        ("messages[3].content", "messages[3].content"),
        ("options.structure.json_schema.schema_json.properties.a", "response_format.json_schema.schema.properties.a"),
        ("options.structure.grammar", "grammar"),
        ("tools[2].parameters_json.properties.a", "tools[2].function.parameters.properties.a"),
    ],
)
def test_the_contracts_fields_are_told_by_the_callers_names(theirs, ours):
    assert rest_field(theirs) == ours
    failed = llm_pb2.Failed(reason="invalid_request", message=f"'{theirs}' is wrong", field=theirs)
    error = as_rest(error_of(failed), OWN_NAMES)
    assert (error.field, error.message) == (ours, f"'{ours}' is wrong")


def test_the_prompt_of_a_chat_is_its_messages():
    failed = llm_pb2.Failed(reason="context_length_exceeded", message="9 tokens, 8 fit", field="prompt")
    error = as_rest(error_of(failed), CHAT_NAMES)
    assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "messages")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("options.limits.stop[2]", "stop_sequences[2]"),
        ("messages[0].content[0].media", "system"),
        ("messages[1].content[1].media", "messages[0].content[3]"),
        ("messages[1].tool_calls", "messages[0]"),
        ("messages[9].content", "input[9].content"),
        ("messages", "input"),
    ],
)
def test_a_route_with_names_of_its_own_is_told_by_those(theirs, ours):
    places = (Place("system"), Place("messages[0]", ("messages[0].content[0]", "messages[0].content[3]")))
    assert Names({"stop": "stop_sequences", "messages": "input"}, places).of(theirs) == ours
