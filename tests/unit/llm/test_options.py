import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniserve.llm.v1 import llm_pb2 as pb
from services.kit.errors import DomainError, Reason
from services.llm import translate
from services.llm.core.options import AskedOptions, AskedSampling, check_options, check_tokens, fit_context
from services.llm.core.wire import Dry, Mirostat, Sampling, Xtc

DEFAULTS = Sampling(temperature=0.8, top_p=0.9)


def check(**asked: object):  # type: ignore[no-untyped-def]
    return check_options(AskedOptions(**asked), vocabulary=100, defaults=DEFAULTS)  # type: ignore[arg-type]


def sampling(**asked: object) -> Sampling:
    return check(sampling=AskedSampling(**asked)).sampling  # type: ignore[arg-type,no-any-return]


def refusal(**asked: object) -> DomainError:
    with pytest.raises(DomainError) as caught:
        check(**asked)
    return caught.value


def test_what_is_not_said_takes_the_defaults() -> None:
    options = check()
    assert options.sampling == DEFAULTS
    assert (options.choices, options.logprobs, options.reuse, options.may_wait) == (1, -1, True, True)
    assert options.max_tokens is None


def test_what_is_said_wins_over_the_defaults_also_when_it_is_zero() -> None:
    chosen = sampling(temperature=0.0, top_k=0, seed=0)
    assert (chosen.temperature, chosen.top_p, chosen.seed) == (0.0, 0.9, 0)


@pytest.mark.parametrize(
    ("asked", "field", "numbers"),
    [
        ({"temperature": -0.1}, "temperature", "0 to 100"),
        ({"temperature": math.inf}, "temperature", "0 to 100"),
        ({"top_p": 0.0}, "top_p", "above 0 to 1"),
        ({"top_p": 1.01}, "top_p", "1.01"),
        ({"top_k": -1}, "top_k", "-1"),
        ({"min_p": 1.5}, "min_p", "0 to 1"),
        ({"typical_p": 0.0}, "typical_p", "above 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty", "-2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "nan"),
        ({"penalty_window": -2}, "penalty_window", "-1 to 1e+06"),
        ({"dry": Dry(-1, 1.75, 2, -1, ())}, "dry.multiplier", "-1"),
        ({"dry": Dry(1, 0.5, 2, -1, ())}, "dry.base", "0.5"),
        ({"dry": Dry(1, 1.75, 2, -1, ("",))}, "dry.sequence_breakers[0]", "1 to 40"),
        ({"dry": Dry(1, 1.75, 2, -1, ("a",) * 33)}, "dry.sequence_breakers", "33"),
        ({"xtc": Xtc(1.5, 0.1)}, "xtc.probability", "1.5"),
        ({"xtc": Xtc(0.5, 0.6)}, "xtc.threshold", "0 to 0.5"),
        ({"mirostat": Mirostat(3, 5, 0.1)}, "mirostat.version", "1 to 2"),
        ({"mirostat": Mirostat(2, 0, 0.1)}, "mirostat.tau", "above 0"),
        ({"logit_bias": {100: 1.0}}, "logit_bias", "0 to 99"),
        ({"logit_bias": {3: 101.0}}, "logit_bias[3]", "-100 to 100"),
    ],
)
def test_sampling_out_of_range_names_the_field_and_the_numbers(
    asked: dict[str, object], field: str, numbers: str
) -> None:
    error = refusal(sampling=AskedSampling(**asked))  # type: ignore[arg-type]
    assert error.reason is Reason.INVALID_REQUEST
    assert error.field == f"options.sampling.{field}"
    assert numbers in error.message
    assert error.field in error.message


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"choices": 0}, "options.n"),
        ({"choices": 17}, "options.n"),
        ({"max_tokens": 0}, "options.limits.max_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "options.top_logprobs"),
        ({"top_logprobs": 1}, "options.top_logprobs"),
        ({"min_probability": 1.5}, "options.limits.min_probability"),
        ({"stop": ("a",) * 17}, "options.limits.stop"),
        ({"stop": ("a", "")}, "options.limits.stop[1]"),
        ({"stop": ("x" * 1025,)}, "options.limits.stop[0]"),
    ],
)
def test_options_out_of_range_name_the_field(asked: dict[str, object], field: str) -> None:
    assert refusal(**asked).field == field


def test_drafts_that_the_settings_do_not_allow_are_refused_and_never_ignored() -> None:
    error = refusal(speculate=True, choices=99)
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "options.speculate")


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.none() | st.integers(1, 10_000))
def test_prompt_and_answer_fit_the_context_or_both_numbers_are_told(
    prompt: int, context: int, asked: int | None
) -> None:
    options = check(max_tokens=asked)
    if prompt < context:
        limits = fit_context(options, prompt_tokens=prompt, context_tokens=context)
        assert 1 <= limits.max_tokens <= context - prompt
        assert asked is None or limits.max_tokens == min(asked, context - prompt)
        return
    with pytest.raises(DomainError) as caught:
        fit_context(options, prompt_tokens=prompt, context_tokens=context)
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert {str(prompt), str(context)} == set(caught.value.metadata.values())
    assert str(prompt) in caught.value.message
    assert str(context) in caught.value.message


def test_an_empty_prompt_has_nothing_to_continue() -> None:
    with pytest.raises(DomainError, match="empty"):
        fit_context(check(), prompt_tokens=0, context_tokens=10)


def test_a_token_outside_the_vocabulary_is_named_by_its_place() -> None:
    check_tokens("prompt.tokens.ids", [0, 99], 100)
    with pytest.raises(DomainError) as caught:
        check_tokens("prompt.tokens.ids", [0, 100, -1], 100)
    assert caught.value.field == "prompt.tokens.ids[1]"


def test_a_text_with_a_gap_is_not_echoed_with_log_probabilities() -> None:
    request = pb.CompleteRequest(prompt=pb.Prompt(text="a"), suffix="b", echo=True, options=pb.Options(logprobs=True))
    with pytest.raises(DomainError, match="echo") as refused:
        translate.completion(request)
    assert refused.value.field == "suffix"
    request.options.logprobs = False
    assert translate.completion(request).echo
