"""Choosers: how one request picks its tokens. Numpy for the common options, llama.cpp's sampler chain for the others."""

import ctypes
import random
from typing import Any, Final, Protocol

import numpy as np

from services.llm.core import choose
from services.llm.core.choose import Floats, Scratch
from services.llm.core.wire import Constraint, Dry, Limits, Sampling
from services.llm.host.bindings import api
from services.llm.host.context import Chain, Context, Tokens
from services.llm.host.grammar import Alphabet, Constrained
from services.llm.host.llama import Vocabulary

_SEEDS: Final = 2**32 - 1  # llama.cpp reads the largest 32-bit number as "random"
_MIROSTAT_CANDIDATES: Final = 100


class Chooser(Protocol):
    """Picks tokens for one choice of one request."""

    def choose(self, logits: Floats, row: int) -> int:
        """Pick a token. `logits`: the output, which may be overwritten; `row`: its entry in the batch."""

    def close(self) -> None:
        """Free what it holds."""


class _Greedy:
    def choose(self, logits: Floats, row: int) -> int:  # noqa: ARG002 - the protocol's signature
        return choose.greedy(logits)

    def pick(self, logits: Floats) -> int:
        return choose.greedy(logits)

    def accept(self, token: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Drawing:
    def __init__(self, sampling: Sampling, seed: int | None, scratch: Scratch) -> None:
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._min_p = sampling.min_p
        self._whole = sampling.top_p >= 1.0 and sampling.min_p <= 0.0
        self._random = random.Random(seed).random  # noqa: S311 - sampling, not a secret
        self._scratch = scratch

    def choose(self, logits: Floats, row: int) -> int:  # noqa: ARG002 - the protocol's signature
        return self.pick(logits)

    def pick(self, logits: Floats) -> int:
        if self._whole:
            return choose.draw(logits, self._scratch, temperature=self._temperature, random=self._random)
        return choose.draw_nucleus(
            logits,
            self._scratch,
            temperature=self._temperature,
            top_p=self._top_p,
            min_p=self._min_p,
            random=self._random,
        )

    def accept(self, token: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Chained:
    def __init__(self, chain: Chain, context: Context) -> None:
        self._chain = chain
        self._context = context

    def choose(self, logits: Floats, row: int) -> int:  # noqa: ARG002 - the protocol's signature
        return self._chain.sample(self._context, row)

    def pick(self, logits: Floats) -> int:
        return self._chain.pick(logits)

    def accept(self, token: int) -> None:
        self._chain.accept(token)

    def close(self) -> None:
        self._chain.close()


class _Biased:
    """Adds to the logits before another chooser looks at them."""

    def __init__(self, chooser: Chooser, bias: dict[int, float]) -> None:
        self._chooser = chooser
        self._tokens = np.fromiter(bias.keys(), np.intp, len(bias))
        self._values = np.fromiter(bias.values(), np.float32, len(bias))

    def choose(self, logits: Floats, row: int) -> int:
        logits[self._tokens] += self._values
        return self._chooser.choose(logits, row)

    def close(self) -> None:
        self._chooser.close()


def chooser(
    sampling: Sampling,
    limits: Limits,
    *,
    choice: int,
    prompt: Tokens,
    vocabulary: Vocabulary,
    ends: tuple[int, ...],
    suppressed: tuple[int, ...],
    context: Context,
    scratch: Scratch,
    constraint: Constraint | None,
    shown: tuple[int, ...],
    alphabet: Alphabet,
) -> Chooser:
    """Return the chooser of a request's choice. Choice i of a seeded request draws with seed + i.

    Raises LlamaError when llama.cpp does not accept the constraint's grammar.
    """
    seed = None if sampling.seed is None else (sampling.seed + choice) % _SEEDS
    picker = _picker(sampling, seed, prompt=prompt, vocabulary=vocabulary, context=context, scratch=scratch)
    chosen: Chooser = picker if constraint is None else Constrained(picker, constraint, alphabet, shown)
    bias = dict(sampling.logit_bias)
    bias.update(dict.fromkeys(suppressed, -np.inf))
    if limits.ignore_eos:
        bias.update(dict.fromkeys(ends, -np.inf))
    return _Biased(chosen, bias) if bias else chosen


def _picker(
    sampling: Sampling,
    seed: int | None,
    *,
    prompt: Tokens,
    vocabulary: Vocabulary,
    context: Context,
    scratch: Scratch,
) -> "_Greedy | _Drawing | _Chained":
    looks_back = _looks_back(sampling)
    if sampling.temperature <= 0.0 and not looks_back:
        return _Greedy()
    simple = not looks_back and sampling.xtc is None and sampling.mirostat is None
    if simple and sampling.top_k <= 0 and sampling.typical_p >= 1.0:
        return _Drawing(sampling, seed, scratch)
    chain = Chain(_samplers(sampling, seed, vocabulary, context))
    if looks_back:
        window = len(prompt) if -1 in _windows(sampling) else max(_windows(sampling))
        for token in prompt[len(prompt) - min(window, len(prompt)) :].tolist():
            chain.accept(token)
    return _Chained(chain, context)


def _penalised(sampling: Sampling) -> bool:
    neutral = (1.0, 0.0, 0.0)
    asked = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return asked != neutral and sampling.penalty_window != 0


def _looks_back(sampling: Sampling) -> bool:
    return _penalised(sampling) or _dry(sampling) is not None


def _dry(sampling: Sampling) -> Dry | None:
    return sampling.dry if sampling.dry is not None and sampling.dry.multiplier > 0.0 else None


def _windows(sampling: Sampling) -> list[int]:
    dry = _dry(sampling)
    return [
        *([sampling.penalty_window] if _penalised(sampling) else []),
        *([dry.window] if dry is not None else []),
    ]


def _samplers(sampling: Sampling, seed: int | None, vocabulary: Vocabulary, context: Context) -> list[Any]:
    """Return llama.cpp's samplers in the order in which its own server chains them."""
    number = random.SystemRandom().randrange(_SEEDS) if seed is None else seed
    samplers: list[Any] = []
    if _penalised(sampling):
        window = context.cells if sampling.penalty_window < 0 else sampling.penalty_window
        samplers.append(
            api.llama_sampler_init_penalties(
                vocabulary.size,
                window,
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
    dry = _dry(sampling)
    if dry is not None:
        samplers.append(_dry_sampler(dry, vocabulary, context))
    if sampling.temperature <= 0.0:
        return [*samplers, api.llama_sampler_init_greedy()]
    mirostat = sampling.mirostat
    if mirostat is not None:
        samplers.append(api.llama_sampler_init_temp(sampling.temperature))
        if mirostat.version == 1:
            last = api.llama_sampler_init_mirostat(
                vocabulary.size, number, mirostat.tau, mirostat.eta, _MIROSTAT_CANDIDATES
            )
        else:
            last = api.llama_sampler_init_mirostat_v2(number, mirostat.tau, mirostat.eta)
        return [*samplers, last]
    samplers += _cuts(sampling, number)
    return [*samplers, api.llama_sampler_init_temp(sampling.temperature), api.llama_sampler_init_dist(number)]


def _cuts(sampling: Sampling, seed: int) -> list[Any]:
    """Return the samplers that cut the distribution."""
    samplers: list[Any] = []
    if sampling.top_k > 0:
        samplers.append(api.llama_sampler_init_top_k(sampling.top_k))
    if sampling.typical_p < 1.0:
        samplers.append(api.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1.0:
        samplers.append(api.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        samplers.append(api.llama_sampler_init_min_p(sampling.min_p, 1))
    if sampling.xtc is not None and sampling.xtc.probability > 0.0:
        samplers.append(api.llama_sampler_init_xtc(sampling.xtc.probability, sampling.xtc.threshold, 1, seed))
    return samplers


def _dry_sampler(dry: Dry, vocabulary: Vocabulary, context: Context) -> Any:  # noqa: ANN401 - a C pointer
    words = [word.encode() for word in dry.sequence_breakers]
    breakers = (ctypes.c_char_p * len(words))(*words)
    window = context.cells if dry.window < 0 else dry.window
    return api.llama_sampler_init_dry(
        vocabulary.pointer, dry.multiplier, dry.base, dry.allowed_length, window, breakers, len(words)
    )
