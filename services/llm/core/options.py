"""What a caller may ask of a generation: ranges, defaults, and refusals that name the field and the numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from services.kit.errors import DomainError, Reason
from services.llm.core.adapters import AskedAdapter
from services.llm.core.structure import Structure
from services.llm.core.wire import Dry, Limits, Mirostat, Sampling, Xtc

MOST_STOPS: Final = 16
MOST_STOP_LENGTH: Final = 1024
MOST_CHOICES: Final = 16
MOST_TOP_LOGPROBS: Final = 20
MOST_BIASES: Final = 4096
MOST_BREAKERS: Final = 32
MOST_WINDOW: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class AskedSampling:
    """Sampling as the caller wrote it; None where nothing was said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_window: int | None = None
    dry: Dry | None = None
    xtc: Xtc | None = None
    mirostat: Mirostat | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AskedOptions:
    """Options as the caller wrote them."""

    sampling: AskedSampling = field(default_factory=AskedSampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_probability: float | None = None
    max_sentences: int | None = None
    choices: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    structure: Structure | None = None
    cache_prompt: bool | None = None
    speculate: bool | None = None
    may_wait: bool | None = None
    adapters: tuple[AskedAdapter, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """Options that can be obeyed. `logprobs`: alternatives per token, -1 for none at all."""

    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    min_probability: float
    max_sentences: int
    choices: int
    logprobs: int
    structure: Structure | None
    reuse: bool
    speculate: bool
    may_wait: bool


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    above_low: bool = False

    def holds(self, value: float) -> bool:
        return (
            math.isfinite(value) and value <= self.high and (value > self.low if self.above_low else value >= self.low)
        )

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above_low else f"{self.low:g}"
        return f"{low} to {self.high:g}" if math.isfinite(self.high) else f"{low} or more"


SAMPLING_RANGES: Final[Mapping[str, _Range]] = MappingProxyType(
    {
        "temperature": _Range(0, 100),
        "top_p": _Range(0, 1, above_low=True),
        "top_k": _Range(0, 2**31 - 1),
        "min_p": _Range(0, 1),
        "typical_p": _Range(0, 1, above_low=True),
        "repetition_penalty": _Range(0, 100, above_low=True),
        "presence_penalty": _Range(-2, 2),
        "frequency_penalty": _Range(-2, 2),
        "penalty_window": _Range(-1, MOST_WINDOW),
    }
)
_DRY_RANGES: Final[Mapping[str, _Range]] = MappingProxyType(
    {
        "multiplier": _Range(0, 100),
        "base": _Range(1, 100),
        "allowed_length": _Range(0, MOST_WINDOW),
        "window": _Range(-1, MOST_WINDOW),
    }
)
_XTC_RANGES: Final[Mapping[str, _Range]] = MappingProxyType({"probability": _Range(0, 1), "threshold": _Range(0, 0.5)})
_MIROSTAT_RANGES: Final[Mapping[str, _Range]] = MappingProxyType(
    {"version": _Range(1, 2), "tau": _Range(0, 100, above_low=True), "eta": _Range(0, 1, above_low=True)}
)


def check_options(
    asked: AskedOptions, *, vocabulary: int, defaults: Sampling, speculates: bool = False, least_tokens: int = 1
) -> Options:
    """Return options with every default filled in. `speculates`: whether the model's settings allow drafts.

    `least_tokens`: 0 where a prompt may be read only.

    Raises DomainError `invalid_request` for a value out of range and `unsupported` for what nothing here obeys yet; both
    name the field by its path in the contract.
    """
    if asked.speculate and not speculates:
        message = "'options.speculate' is true, but OMNISERVE_LLM_SPEC_DRAFT is 0"
        raise DomainError(Reason.UNSUPPORTED, message, field="options.speculate")
    choices = 1 if asked.choices is None else asked.choices
    _check("options.n", choices, _Range(1, MOST_CHOICES))
    if asked.max_tokens is not None:
        _check("options.limits.max_tokens", asked.max_tokens, _Range(least_tokens, 2**32 - 1))
    _check("options.top_logprobs", asked.top_logprobs, _Range(0, MOST_TOP_LOGPROBS))
    if asked.top_logprobs and not asked.logprobs:
        raise _refusal("options.top_logprobs", f"is {asked.top_logprobs}, but 'options.logprobs' is false")
    min_probability = asked.min_probability or 0.0
    _check("options.limits.min_probability", min_probability, _Range(0, 1))
    if asked.max_sentences is not None:
        _check("options.limits.max_sentences", asked.max_sentences, _Range(1, 2**32 - 1))
    _check_stops(asked.stop)
    if asked.structure is not None and asked.ignore_eos:
        raise _refusal("options.limits.ignore_eos", "cannot be combined with structured output, which ends somewhere")
    return Options(
        sampling=_sampling(asked.sampling, vocabulary, defaults),
        max_tokens=asked.max_tokens,
        stop=asked.stop,
        ignore_eos=asked.ignore_eos,
        min_probability=min_probability,
        max_sentences=asked.max_sentences or 0,
        choices=choices,
        logprobs=asked.top_logprobs if asked.logprobs else -1,
        structure=asked.structure,
        reuse=asked.cache_prompt is not False,
        speculate=speculates and asked.speculate is not False,
        may_wait=asked.may_wait is not False,
    )


def fit_context(options: Options, *, prompt_tokens: int, context_tokens: int) -> Limits:
    """Return the limits of a generation whose prompt and answer fit the context together.

    Raises DomainError `context_length_exceeded` with both numbers when the prompt leaves no room for one token, and
    `invalid_request` when it is empty.
    """
    if prompt_tokens == 0:
        raise _refusal("prompt", "is empty: there is nothing to continue")
    room = context_tokens - prompt_tokens
    if room < 1:
        raise DomainError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {prompt_tokens} tokens; the context holds {context_tokens}, and the answer needs at least 1",
            field="prompt",
            metadata={"prompt_tokens": str(prompt_tokens), "context_tokens": str(context_tokens)},
        )
    return Limits(
        max_tokens=room if options.max_tokens is None else min(options.max_tokens, room),
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        min_probability=options.min_probability,
        max_sentences=options.max_sentences,
    )


def check_tokens(path: str, tokens: list[int], vocabulary: int) -> None:
    """Raise DomainError `invalid_request` naming the first token outside the vocabulary."""
    for place, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            raise _refusal(f"{path}[{place}]", f"is {token}; the vocabulary has the tokens 0 to {vocabulary - 1}")


def _sampling(asked: AskedSampling, vocabulary: int, defaults: Sampling) -> Sampling:
    values = {name: getattr(asked, name) for name in SAMPLING_RANGES}
    for name, value in values.items():
        if value is not None:
            _check(f"options.sampling.{name}", value, SAMPLING_RANGES[name])
    chosen = {name: getattr(defaults, name) if value is None else value for name, value in values.items()}
    _check_group("dry", asked.dry, _DRY_RANGES)
    _check_group("xtc", asked.xtc, _XTC_RANGES)
    _check_group("mirostat", asked.mirostat, _MIROSTAT_RANGES)
    if asked.dry is not None:
        _check_breakers(asked.dry.sequence_breakers)
    _check_bias(asked.logit_bias, vocabulary)
    return Sampling(
        **chosen,
        seed=asked.seed,
        dry=asked.dry,
        xtc=asked.xtc,
        mirostat=asked.mirostat,
        logit_bias=dict(asked.logit_bias),
    )


def _check_group(name: str, group: Dry | Xtc | Mirostat | None, ranges: Mapping[str, _Range]) -> None:
    if group is not None:
        for member, allowed in ranges.items():
            _check(f"options.sampling.{name}.{member}", getattr(group, member), allowed)


def _check_stops(stops: tuple[str, ...]) -> None:
    path = "options.limits.stop"
    if len(stops) > MOST_STOPS:
        raise _refusal(path, f"has {len(stops)} strings; at most {MOST_STOPS} are allowed")
    for place, stop in enumerate(stops):
        if not 1 <= len(stop) <= MOST_STOP_LENGTH:
            raise _refusal(f"{path}[{place}]", f"has {len(stop)} characters; 1 to {MOST_STOP_LENGTH} are allowed")


def _check_breakers(breakers: tuple[str, ...]) -> None:
    path = "options.sampling.dry.sequence_breakers"
    if len(breakers) > MOST_BREAKERS:
        raise _refusal(path, f"has {len(breakers)} strings; at most {MOST_BREAKERS} are allowed")
    for place, breaker in enumerate(breakers):
        if not 1 <= len(breaker.encode()) <= 40 or "\0" in breaker:
            raise _refusal(f"{path}[{place}]", "must have 1 to 40 bytes, none of them zero")


def _check_bias(bias: Mapping[int, float], vocabulary: int) -> None:
    path = "options.sampling.logit_bias"
    if len(bias) > MOST_BIASES:
        raise _refusal(path, f"has {len(bias)} tokens; at most {MOST_BIASES} are allowed")
    for token, value in bias.items():
        if not 0 <= token < vocabulary:
            raise _refusal(path, f"names token {token}; the vocabulary has the tokens 0 to {vocabulary - 1}")
        _check(f"{path}[{token}]", value, _Range(-100, 100))


def _check(path: str, value: float, allowed: _Range) -> None:
    if not allowed.holds(value):
        raise _refusal(path, f"is {value:g}; {allowed} is allowed")


def _refusal(path: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {sentence}", field=path)
