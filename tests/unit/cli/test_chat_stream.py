import json

import pytest

from cli.chat.client import ChatOptions, request_body
from cli.chat.run import full_prompt
from cli.chat.stats import Stopwatch, describe
from cli.chat.stream import ChatReader, Reasoning, Text, Usage, Waiting
from cli.errors import CliError
from cli.sse import SseComment, SseEvent


def event(**body) -> SseEvent:
    return SseEvent(json.dumps(body))


def delta(finish=None, **fields) -> SseEvent:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


def test_an_answer_is_its_text_its_reasoning_its_usage_and_its_end():
    reader = ChatReader()
    assert reader.read(delta(role="assistant", content="")) == []
    assert reader.read(delta(reasoning_content="hm", content="Pa")) == [Reasoning("hm"), Text("Pa")]
    assert reader.read(delta(content="ris")) == [Text("ris")]
    assert reader.read(delta("stop")) == []
    counts = {"prompt_tokens": 5, "completion_tokens": 2}
    assert reader.read(event(choices=[], usage=counts, omniserve={"queue_ms": 3, "decode_ms": 4})) == []
    assert reader.read(SseEvent("[DONE]")) == []
    reader.finish()
    assert (reader.text, reader.finish_reason, reader.usage) == ("Paris", "stop", Usage(5, 2, 0, 3, 4))


def test_a_finish_reason_without_the_closing_mark_is_no_end():
    reader = ChatReader()
    reader.read(delta("stop", content="Paris"))
    with pytest.raises(CliError, match="cut short"):
        reader.finish()


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("queued 3", [Waiting("queued, place 3")]),
        ("loading", [Waiting("loading the model")]),
        ("loading 0.50", [Waiting("loading the model, 50%")]),
        ("prefill 10/200", [Waiting("reading the prompt, 10 of 200 tokens")]),
        ("queued here", []),
        ("", []),
        ("keep-alive", []),
    ],
)
def test_comments_tell_what_is_waited_for(comment, expected):
    assert ChatReader().read(SseComment(comment)) == expected


@pytest.mark.parametrize(
    "item",
    [
        event(error={"message": "It broke.", "reason": "engine_failed"}),
        SseEvent(json.dumps({"error": {"message": "It broke.", "reason": "engine_failed"}}), "error"),
        SseEvent(json.dumps({"message": "It broke.", "reason": "engine_failed"}), "error"),
    ],
)
def test_an_error_event_of_any_shape_is_one_line(item):
    with pytest.raises(CliError, match=r"^It broke\. \[engine_failed\]$"):
        ChatReader().read(item)


@pytest.mark.parametrize("data", ["", "nonsense", "[1]", '"text"', "{"])
def test_data_that_is_no_chunk_is_refused(data):
    with pytest.raises(CliError, match="no chat chunk"):
        ChatReader().read(SseEvent(data))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": None},
        {"choices": [1]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": 1}}]},
        {"usage": 3},
    ],
)
def test_fields_that_are_missing_or_of_another_type_are_passed_over(body):
    assert ChatReader().read(event(**body)) == []


def test_nothing_is_sent_that_was_not_asked_for():
    body = request_body([], ChatOptions())
    assert sorted(body) == ["messages", "stream", "stream_options"]
    assert request_body([], ChatOptions(temperature=0.0))["temperature"] == 0.0


@pytest.mark.parametrize(
    ("argument", "piped", "expected"),
    [
        (None, None, None),
        ("a", None, "a"),
        (None, "b", "b"),
        (None, "", ""),
        ("a", "", "a"),
        ("a", "b", "a\n\nb"),
    ],
)
def test_an_argument_and_a_pipe_make_one_prompt(argument, piped, expected):
    assert full_prompt(argument, piped) == expected


def test_the_rate_leaves_out_the_first_token_since_it_waited_for_the_prompt():
    watch = Stopwatch(asked=10.0)
    watch.piece(11.0)
    watch.piece(12.0)
    watch.piece(13.0)
    assert (
        describe(watch, Usage(7, 21, 3)) == "21 tokens, 10.0 tokens/s, first after 1.00 s, prompt 7 tokens (3 cached)"
    )


def test_the_engines_own_times_are_believed_where_they_are_told():
    watch = Stopwatch(asked=10.0)
    watch.piece(12.0)
    line = describe(watch, Usage(7, 11, 0, queue_ms=1500, decode_ms=500))
    assert line == "11 tokens, 20.0 tokens/s, first after 2.00 s (1.50 s queued), prompt 7 tokens"


def test_a_rate_that_cannot_be_known_is_not_given():
    watch = Stopwatch(asked=10.0)
    assert describe(watch, None) == "no tokens"
    watch.piece(11.0)
    assert describe(watch, Usage(7, 1, 0)) == "1 tokens, first after 1.00 s, prompt 7 tokens"
    assert describe(watch, None) == "first after 1.00 s"
