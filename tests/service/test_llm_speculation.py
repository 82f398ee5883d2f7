"""Speculation on the real model: what is emitted is what the sampler picked from the logits that verified it."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from services.llm.core.wire import Cancel, Sampling, SpeculationRules
from services.llm.host.llama import Model
from tests.fixtures.engine import GREEDY, SLOTS, Driver, answer_tokens, assert_alike, chat, make, recorded

RULES = SpeculationRules(draft=6, min_ngram=2, max_ngram=4, patience=3, probe=16)
SAMPLES = 6 * SLOTS
LIST = "apple, pear, plum, cherry, fig, grape, "
COPY = chat(f"Repeat this list twice, word for word: {LIST * 2}")


@pytest.fixture(scope="module")
def shared(whole_model: Model) -> Driver:
    return make(whole_model, speculation=RULES)


@pytest.fixture(scope="module")
def shared_quick(small_model: Model) -> Driver:
    return make(small_model, speculation=RULES)


@pytest.fixture
def driver(shared: Driver) -> Iterator[Driver]:
    """An engine whose answers make sense."""
    yield shared
    assert_nothing_leaked(shared)


@pytest.fixture
def quick(shared_quick: Driver) -> Iterator[Driver]:
    """An engine whose answers come quickly and say nothing."""
    yield shared_quick
    assert_nothing_leaked(shared_quick)


def assert_nothing_leaked(driver: Driver) -> None:
    driver.until(driver.idle)
    driver.engine._roster.forget_warm()
    assert driver.engine._roster.cells.used == 0, "cells leaked"
    assert len(driver.engine._roster._numbers) == SLOTS + 16, "sequence numbers leaked"


def test_a_copied_answer_takes_fewer_steps_than_it_has_tokens(driver: Driver) -> None:
    before = driver.counters.steps, driver.counters.calls_saved
    request = driver.submit(COPY, max_tokens=48, ignore_eos=True, speculate=True)
    driver.until(lambda: (request, 0) in driver.finished)
    finish = driver.finished[request, 0]
    steps, saved = driver.counters.steps - before[0], driver.counters.calls_saved - before[1]
    assert finish.completion_tokens == 48
    assert 0 < finish.accepted_tokens <= finish.drafted_tokens
    assert saved == finish.accepted_tokens
    assert steps == 48 - saved


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=0.8, seed=5),
        Sampling(temperature=0.7, top_k=20, seed=6),
        Sampling(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=7),
    ],
    ids=["greedy", "drawn", "top-k", "penalties"],
)
def test_every_token_is_the_one_that_was_picked_from_the_logits_that_verified_it(
    quick: Driver, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    seen = recorded(quick, monkeypatch)
    requests = [
        quick.submit(COPY, sampling=sampling, max_tokens=40, ignore_eos=True, logprobs=0, speculate=True)
        for _ in range(3)
    ]
    quick.until(lambda: all((request, 0) in quick.finished for request in requests))
    for request in requests:
        assert answer_tokens(quick, request) == [token for _, token in seen[request]]
        assert quick.finished[request, 0].drafted_tokens > 0
        if sampling is GREEDY:
            assert [int(np.argmax(logits)) for logits, _ in seen[request]] == answer_tokens(quick, request)


def test_the_logits_that_verify_are_those_of_the_text_so_far(quick: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = recorded(quick, monkeypatch)
    request = quick.submit(COPY, max_tokens=40, ignore_eos=True, logprobs=0, speculate=True)
    quick.until(lambda: (request, 0) in quick.finished)
    answer, prompt = answer_tokens(quick, request), quick.tokens(COPY)
    places = range(0, 40, 6)
    alone = []
    for place in places:
        again = quick.submit(prompt + answer[:place], max_tokens=1, ignore_eos=True)
        quick.until(lambda again=again: (again, 0) in quick.finished)
        alone.append(seen[again][0][0])
    verified = [seen[request][place][0] for place in places]
    likeness = np.corrcoef(verified, alone)[: len(places), len(places) :]
    # Another batch shape rounds differently, but nothing is as much alike as the same place.
    assert float(likeness.diagonal().min()) > 0.99
    assert likeness.argmax(axis=1).tolist() == list(range(len(places)))


def test_sampled_answers_have_the_same_distribution_with_and_without(quick: Driver) -> None:
    """Pearson's chi-square test of homogeneity over the third word's first token, at a critical value of p = 0.001."""
    counts = {speculate: Counter[str]() for speculate in (False, True)}
    prompt = "red, blue, red, blue, red, blue, red, blue, red, "
    for speculate, counted in counts.items():
        for seed in range(0, SAMPLES, SLOTS):
            request = quick.submit(
                prompt,
                sampling=Sampling(temperature=1.5, seed=seed + SAMPLES * speculate),
                max_tokens=4,
                choices=SLOTS,
                ignore_eos=True,
                speculate=speculate,
            )
            quick.until(lambda request=request: (request, SLOTS - 1) in quick.finished and quick.idle())
            for choice in range(SLOTS):
                words = quick.texts[request, choice].replace(",", " ").split()
                counted[words[1] if len(words) > 1 else ""] += 1
    assert_alike(counts[False], counts[True])


def test_who_does_not_want_drafts_gets_none(quick: Driver) -> None:
    request = quick.submit(COPY, max_tokens=20, ignore_eos=True)
    quick.until(lambda: (request, 0) in quick.finished)
    assert quick.finished[request, 0].drafted_tokens == 0


def test_max_tokens_is_exact_with_drafts(quick: Driver) -> None:
    for most in (1, 2, 3, 7):
        request = quick.submit(COPY, max_tokens=most, ignore_eos=True, speculate=True)
        quick.until(lambda request=request: (request, 0) in quick.finished)
        assert quick.finished[request, 0].completion_tokens == most
        assert quick.finished[request, 0].reason == "length"


def test_a_stop_string_inside_a_draft_ends_the_answer_there(quick: Driver) -> None:
    plain = quick.run(COPY, max_tokens=40, ignore_eos=True, speculate=True)
    stop = plain[len(plain) * 2 // 3 :][:6]
    request = quick.submit(COPY, max_tokens=40, ignore_eos=True, speculate=True, stop=(stop,))
    quick.until(lambda: (request, 0) in quick.finished)
    assert quick.finished[request, 0].stop_string == stop
    assert quick.texts[request, 0] == plain[: plain.index(stop)]


def test_an_answer_with_drafts_stays_warm_and_true(driver: Driver) -> None:
    request = driver.submit(COPY, max_tokens=30, ignore_eos=True, logprobs=0, reuse=True, speculate=True)
    driver.until(lambda: (request, 0) in driver.finished)
    whole = driver.tokens(COPY) + answer_tokens(driver, request)
    follow = driver.tokens("<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n")
    warm = driver.submit(whole + follow, max_tokens=8, reuse=True, logprobs=0)
    driver.until(lambda: (warm, 0) in driver.finished)
    assert driver.finished[warm, 0].cached_tokens >= len(whole) - 1
    cold = driver.submit(whole + follow, max_tokens=8, logprobs=0)
    driver.until(lambda: (cold, 0) in driver.finished)
    first = {
        request: next(d.logprobs[0] for d in driver.deltas if d.request == request and d.logprobs)
        for request in (warm, cold)
    }
    # Rounding in another batch shape moves a 4-bit model's logits, a wrong cell changes what comes next.
    assert first[warm].token == first[cold].token
    assert abs(first[warm].logprob - first[cold].logprob) < 0.6


def test_drafts_beside_other_answers_change_nothing_for_them(driver: Driver) -> None:
    question = chat("What is the capital of France?")
    speculating = [driver.submit(COPY, max_tokens=40, ignore_eos=True, speculate=True) for _ in range(3)]
    plain = [driver.submit(question, max_tokens=8) for _ in range(3)]
    driver.until(lambda: all((request, 0) in driver.finished for request in (*speculating, *plain)))
    assert all("Paris" in driver.texts[request, 0] for request in plain)
    assert all(driver.finished[request, 0].accepted_tokens > 0 for request in speculating)


def test_answers_with_drafts_that_are_cancelled_leave_nothing(quick: Driver) -> None:
    for turns in range(1, 14, 3):
        request = quick.submit(COPY, max_tokens=200, ignore_eos=True, speculate=True)
        for _ in range(turns):
            quick.turn()
        quick.engine.tell(Cancel(request))
        quick.until(quick.idle)


def test_where_cells_are_scarce_drafts_give_way_to_answers(small_model: Model) -> None:
    quick = make(small_model, cells=512, warm=2, speculation=RULES)
    requests = [quick.submit(COPY, max_tokens=60, ignore_eos=True, speculate=True) for _ in range(5)]
    quick.until(lambda: all((request, 0) in quick.finished for request in requests))
    assert all(quick.finished[request, 0].completion_tokens == 60 for request in requests)
    quick.engine._roster.forget_warm()
    assert quick.engine._roster.cells.used == 0
