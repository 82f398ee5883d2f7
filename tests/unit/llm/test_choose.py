import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from services.llm.core.choose import Scratch, draw, draw_nucleus, greedy, likelihood, nucleus

rows = hnp.arrays(np.float32, st.integers(1, 700), elements=st.floats(-30, 30, width=32))


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def is_plausible(counts: Counter[int], expected: np.ndarray, draws: int) -> bool:
    """Chi-square over the tokens that are expected at least five times; the rest counts as one."""
    common = [token for token in range(len(expected)) if expected[token] * draws >= 5]
    rest = draws - sum(counts[token] for token in common)
    rest_expected = draws - sum(expected[token] * draws for token in common)
    chi = sum((counts[token] - expected[token] * draws) ** 2 / (expected[token] * draws) for token in common)
    if rest_expected >= 5:
        chi += (rest - rest_expected) ** 2 / rest_expected
    freedom = max(len(common), 1)
    return bool(chi < freedom + 5 * np.sqrt(2 * freedom) + 10)


@given(rows)
def test_greedy_takes_the_first_of_the_largest(logits: np.ndarray) -> None:
    assert greedy(logits) == int(np.flatnonzero(logits == logits.max())[0])


@given(rows, st.floats(0.05, 5), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_token_at_its_place_in_the_running_sum(logits: np.ndarray, temperature: float, u: float) -> None:
    token = draw(logits, Scratch(len(logits)), temperature=temperature, random=lambda: u)
    sums = softmax(logits, temperature).cumsum()
    assert 0 <= token < len(logits)
    assert sums[token] >= u - 1e-4
    assert (sums[token - 1] if token else 0.0) <= u + 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(600) * 3).astype(np.float32)
    scratch, chance, draws = Scratch(600), random.Random(2).random, 20_000
    counts = Counter(draw(logits, scratch, temperature=temperature, random=chance) for _ in range(draws))
    assert is_plausible(counts, softmax(logits, temperature), draws)


@pytest.mark.parametrize(
    ("top_p", "min_p", "temperature"), [(0.9, 0.0, 1.0), (1.0, 0.1, 1.0), (0.8, 0.05, 0.7), (0.5, 0.0, 2.0)]
)
def test_draws_from_the_nucleus_follow_the_cut_distribution(top_p: float, min_p: float, temperature: float) -> None:
    logits = (np.random.default_rng(3).standard_normal(600) * 3).astype(np.float32)
    kept = nucleus(np.exp(logits - logits.max()), top_p=top_p, min_p=min_p)
    expected = np.zeros(600)
    expected[kept] = softmax(logits, temperature)[kept]
    expected /= expected.sum()
    scratch, chance, draws = Scratch(600), random.Random(4).random, 20_000
    counts = Counter(
        draw_nucleus(logits, scratch, temperature=temperature, top_p=top_p, min_p=min_p, random=chance)
        for _ in range(draws)
    )
    assert set(counts) <= set(kept.tolist())
    assert is_plausible(counts, expected, draws)


@given(rows, st.floats(0.01, 1), st.floats(0, 1))
def test_the_nucleus_is_the_smallest_that_reaches_top_p(logits: np.ndarray, top_p: float, min_p: float) -> None:
    weights = np.exp(logits - logits.max())
    kept = nucleus(weights, top_p=top_p, min_p=min_p)
    assert len(kept) >= 1
    assert weights[kept[0]] == weights.max()
    assert all(weights[token] >= np.float32(min_p) for token in kept)
    before_last = weights[kept[:-1]].sum(dtype=np.float64) / weights.sum(dtype=np.float64)
    assert before_last < top_p + 1e-6


def test_a_nucleus_that_is_hard_to_hit_is_still_hit() -> None:
    logits = np.zeros(5000, np.float32)
    logits[17] = 1.0
    scratch = Scratch(5000)
    token = draw_nucleus(logits, scratch, temperature=5.0, top_p=1.0, min_p=0.9, random=random.Random(0).random)
    assert token == 17


def test_tokens_that_are_forbidden_are_never_drawn() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[3, 299]] = 0.0
    scratch = Scratch(300)
    for u in (0.0, 0.3, 0.7, 1 - 2**-53):
        assert draw(logits, scratch, temperature=1.0, random=lambda u=u: u) in {3, 299}


@given(rows, st.data())
def test_likelihoods_are_those_of_the_softmax(logits: np.ndarray, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    best = data.draw(st.integers(0, min(5, len(logits))))
    found = likelihood(logits, Scratch(len(logits)), token=token, best=best)
    truth = np.log(softmax(logits))
    assert abs(found.chosen - truth[token]) < 1e-3
    assert len(found.best) == best
    values = [value for _, value in found.best]
    assert values == sorted(values, reverse=True)
    if best:
        assert values[0] == pytest.approx(truth.max(), abs=1e-3)
