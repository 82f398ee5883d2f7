"""The text-generator routes: bodies become generations, and results say what ended them."""

import pytest

from facade.translate.answers import Head
from facade.translate.completion import read_engine_completion
from facade.translate.generate import AUTOCOMPLETE, GENERATE, SUMMARIZATION, Results, with_model
from facade.translate.models import choose_model
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError

PLAYGROUND = {
    "text": "Hi I am bored so looking",
    "number_of_results": 1,
    "max_length": 100,
    "max_sentences": 1,
    "min_probability": 0.7,
    "model": "best",
    "enable_thinking": False,
}
MODELS = [
    llm_pb2.Model(name="embed", kind=llm_pb2.MODEL_KIND_EMBEDDING, parameters=9_000_000_000),
    llm_pb2.Model(name="small", kind=llm_pb2.MODEL_KIND_CHAT, parameters=1, aliases=["tiny"]),
    llm_pb2.Model(name="large", kind=llm_pb2.MODEL_KIND_CHAT, parameters=2),
]


def only(call):
    (request,) = call.requests
    return request


def test_a_text_is_continued_with_all_its_parameters():
    call = GENERATE.read(
        {
            "text": "Once",
            "number_of_results": 3,
            "max_length": 7,
            "max_sentences": 2,
            "min_probability": 0.25,
            "min_p": 0.5,
            "stop_sequences": "END",
            "temperature": 0.5,
            "top_p": 0.75,
            "top_k": 9,
            "repetition_penalty": 1.5,
            "seed": 4,
        }
    )
    request = only(call)
    assert isinstance(request, llm_pb2.CompleteRequest)
    assert (request.prompt.text, call.choices, request.options.n) == ("Once", 3, 3)
    limits, sampling = request.options.limits, request.options.sampling
    assert (limits.max_tokens, limits.max_sentences, limits.min_probability, list(limits.stop)) == (7, 2, 0.25, ["END"])
    assert (sampling.min_p, sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.5, 0.75, 9)
    assert (sampling.repetition_penalty, sampling.seed) == (1.5, 4)


def test_the_playgrounds_request_gets_a_reply_without_thinking():
    request = only(GENERATE.read(PLAYGROUND))
    assert isinstance(request, llm_pb2.ChatRequest)
    assert request.HasField("enable_thinking")
    assert not request.enable_thinking
    assert [message.role for message in request.messages] == ["user"]


def test_no_sentences_mean_no_limit_and_stops_may_be_a_list():
    limits = only(GENERATE.read({"text": "x", "max_sentences": 0, "stop_sequences": ["a", "b"]})).options.limits
    assert not limits.HasField("max_sentences")
    assert list(limits.stop) == ["a", "b"]


def test_autocomplete_is_short_unless_asked_otherwise():
    limits = only(AUTOCOMPLETE.read({"text": "x"})).options.limits
    assert (limits.max_tokens, limits.max_sentences) == (16, 1)
    limits = only(AUTOCOMPLETE.read({"text": "x", "max_length": 40, "max_sentences": 0})).options.limits
    assert limits.max_tokens == 40
    assert not limits.HasField("max_sentences")


def test_a_summary_is_asked_of_the_model_as_a_chat():
    request = only(SUMMARIZATION.read({"text": "A long text.", "max_length": 9}))
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.options.limits.max_tokens == 9
    assert not request.enable_thinking


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"text": ""}, "text"),
        ({"text": 7}, "text"),
        ({}, "text"),
        ({"text": "x", "number_of_results": 0}, "number_of_results"),
        ({"text": "x", "number_of_results": 17}, "number_of_results"),
        ({"text": "x", "max_length": 0}, "max_length"),
        ({"text": "x", "max_sentences": -1}, "max_sentences"),
        ({"text": "x", "min_probability": 2}, "min_probability"),
        ({"text": "x", "min_p": -1}, "min_p"),
        ({"text": "x", "stop_sequences": [7]}, "stop_sequences[0]"),
        ({"text": "x", "stop_sequences": [""]}, "stop_sequences[0]"),
        ({"text": "x", "enable_thinking": "no"}, "enable_thinking"),
        ({"text": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"text": "x", "seed": 0.5}, "seed"),
        ({"text": "x", "max_tokens": 5}, "max_tokens"),
    ],
)
def test_every_malformed_field_is_named(fields, at_fault):
    with pytest.raises(DomainError) as refused:
        GENERATE.read(fields)
    assert refused.value.field == at_fault


def test_a_summary_has_one_result():
    with pytest.raises(DomainError) as refused:
        SUMMARIZATION.read({"text": "x", "number_of_results": 2})
    assert refused.value.field == "number_of_results"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"finish_reason": llm_pb2.FINISH_REASON_LENGTH}, "max_length"),
        ({"finish_reason": llm_pb2.FINISH_REASON_STOP}, "end_of_text"),
        ({"finish_reason": llm_pb2.FINISH_REASON_STOP, "sentence_limit": True}, "max_sentences"),
        ({"finish_reason": llm_pb2.FINISH_REASON_STOP, "stop_string": "END"}, "stop_sequences"),
        ({"finish_reason": llm_pb2.FINISH_REASON_MIN_PROBABILITY}, "min_probability"),
    ],
)
def test_a_result_says_which_parameter_ended_it(end, reason):
    results = Results(Head("", 1, "small"))
    results.output(0, llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(text="Hi", tokens=2, reasoning="hm")]))
    results.output(0, llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(tokens=1, **end)]))
    results.done(0, llm_pb2.Done(usage=llm_pb2.Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=3)))
    (result,) = results.result()
    assert (result["generated_text"], result["stop_reason"], result["reasoning"]) == ("Hi", reason, "hm")
    assert result.get("stop_sequence") == end.get("stop_string")
    assert result["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "cached_prompt_tokens": 4,
    }


@pytest.mark.parametrize(
    ("asked", "largest", "chosen"),
    [
        ("", False, ""),
        ("best", False, ""),
        ("best", True, "large"),
        ("", True, "large"),
        ("tiny", True, "tiny"),
        ("unknown", False, "unknown"),
    ],
)
def test_the_largest_model_is_taken_only_when_none_is_named(asked, largest, chosen):
    assert choose_model(MODELS, asked, largest=largest) == chosen


def test_best_is_a_model_where_the_catalogue_says_so_and_nothing_is_known_of_an_empty_one():
    best = llm_pb2.Model(name="huge", aliases=["best"], kind=llm_pb2.MODEL_KIND_CHAT)
    assert choose_model([*MODELS, best], "best", largest=True) == "best"
    assert choose_model([], "", largest=True) == ""


def test_another_model_changes_the_requests_and_not_those_of_the_first_call():
    first = GENERATE.read(PLAYGROUND)
    second = with_model(first, "large")
    assert (only(first).model, only(second).model, second.model) == ("best", "large", "large")


def test_the_path_of_the_older_route_names_the_model():
    assert read_engine_completion({"prompt": "x"}, "small").model == "small"
    assert read_engine_completion({"prompt": "x", "model": "small"}, "small").model == "small"
    with pytest.raises(DomainError) as refused:
        read_engine_completion({"prompt": "x", "model": "large"}, "small")
    assert refused.value.field == "model"
