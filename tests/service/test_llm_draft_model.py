"""A draft model on the real engine. The model is its own draft here, so it is right nearly always, and never bound to be."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.kit.clock import SystemClock
from services.kit.hosts.keeper import EngineLimits
from services.llm.adapters.engine import Engine
from services.llm.core.choose import Floats
from services.llm.core.wire import Cancel, Delta, Limits, Sampling, SpeculationRules, Submit, pack_tokens
from services.llm.host import draft_model
from services.llm.host.draft_model import DraftModel, MisfitError, Wish, check_vocabulary
from services.llm.host.llama import Model
from services.llm.served import read_served
from services.llm.settings import LlmSettings
from tests.fixtures.engine import GREEDY, SLOTS, Driver, answer_tokens, assert_alike, chat, make, recorded

RULES = SpeculationRules(draft=4, patience=3, probe=16, lookup=False)
STORY = chat("Tell me about the sea in two sentences.")
SAMPLES = 3 * SLOTS


@pytest.fixture(scope="module")
def shared(small_model: Model) -> Driver:
    return make(small_model, speculation=RULES, draft=small_model)


def drafting(driver: Driver) -> DraftModel:
    found = driver.engine._roster.draft_model
    assert found is not None
    return found


@pytest.fixture
def driver(shared: Driver) -> Iterator[Driver]:
    yield shared
    shared.until(shared.idle)
    shared.engine._roster.forget_warm()
    assert shared.engine._roster.cells.used == 0, "cells leaked"
    assert drafting(shared).idle, "the draft model remembers an answer that is gone"
    assert len(drafting(shared)._numbers) == SLOTS


def likeliest(driver: Driver, logits: Floats) -> int:
    """Return what greedy choosing takes, where the answer may not end."""
    allowed = logits.copy()
    allowed[list(driver.model.vocabulary.ends())] = -np.inf
    return int(np.argmax(allowed))


def test_what_the_model_foretells_takes_no_step_of_its_own(driver: Driver) -> None:
    counters = driver.counters
    steps, saved, by_model = counters.steps, counters.calls_saved, counters.model_calls_saved
    request = driver.submit(STORY, max_tokens=16, ignore_eos=True, speculate=True)
    driver.until(lambda: (request, 0) in driver.finished)
    finish = driver.finished[request, 0]
    assert finish.completion_tokens == 16
    assert 0 < finish.accepted_tokens <= finish.drafted_tokens
    assert counters.calls_saved - saved == counters.model_calls_saved - by_model == finish.accepted_tokens
    assert counters.steps - steps == 16 - finish.accepted_tokens
    assert drafting(driver).calls > 0


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=5)], ids=["greedy", "drawn"])
def test_every_token_is_the_one_that_was_picked_from_the_logits_that_verified_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    seen = recorded(driver, monkeypatch)
    requests = [
        driver.submit(STORY, sampling=sampling, max_tokens=14, ignore_eos=True, logprobs=0, speculate=True)
        for _ in range(2)
    ]
    driver.until(lambda: all((request, 0) in driver.finished for request in requests))
    for request in requests:
        assert answer_tokens(driver, request) == [token for _, token in seen[request]]
        assert driver.finished[request, 0].drafted_tokens > 0
        if sampling is GREEDY:
            assert [likeliest(driver, logits) for logits, _ in seen[request]] == answer_tokens(driver, request)


def test_the_logits_that_verify_are_those_of_the_text_so_far(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = recorded(driver, monkeypatch)
    request = driver.submit(STORY, max_tokens=16, ignore_eos=True, logprobs=0, speculate=True)
    driver.until(lambda: (request, 0) in driver.finished)
    answer, prompt, places = answer_tokens(driver, request), driver.tokens(STORY), range(0, 16, 5)
    alone = []
    for place in places:
        again = driver.submit(prompt + answer[:place], max_tokens=1, ignore_eos=True)
        driver.until(lambda again=again: (again, 0) in driver.finished)
        alone.append(seen[again][0][0])
    likeness = np.corrcoef([seen[request][place][0] for place in places], alone)[: len(places), len(places) :]
    assert float(likeness.diagonal().min()) > 0.99
    assert likeness.argmax(axis=1).tolist() == list(range(len(places)))


def test_sampled_answers_have_the_same_distribution_with_and_without(driver: Driver) -> None:
    counts = {speculate: Counter[str]() for speculate in (False, True)}
    prompt = "red, blue, red, blue, red, blue, red, blue, red, "
    for speculate, counted in counts.items():
        for seed in range(0, SAMPLES, SLOTS):
            request = driver.submit(
                prompt,
                sampling=Sampling(temperature=1.5, seed=seed + SAMPLES * speculate),
                max_tokens=3,
                choices=SLOTS,
                ignore_eos=True,
                speculate=speculate,
            )
            driver.until(lambda request=request: (request, SLOTS - 1) in driver.finished and driver.idle())
            for choice in range(SLOTS):
                words = driver.texts[request, choice].replace(",", " ").split()
                counted[words[1] if len(words) > 1 else ""] += 1
    assert_alike(counts[False], counts[True])


def test_what_was_guessed_in_vain_is_forgotten_before_the_text_goes_on(driver: Driver) -> None:
    """The draft model is told another answer than it guessed, and then guesses as if it had read that at once."""
    model, prompt = drafting(driver), np.asarray(driver.tokens(STORY), np.int32)
    first, other = draft_model.Reader(), draft_model.Reader()
    (guessed,) = model.propose([Wish(first, prompt, [], 4)])
    assert guessed
    answer = [*guessed[:1], *driver.tokens(" old and wide")]
    (again,) = model.propose([Wish(first, prompt, answer, 4)])
    (afresh,) = model.propose([Wish(other, prompt, answer, 4)])
    assert again == afresh
    model.leave(first)
    model.leave(other)


def test_a_long_text_is_read_in_parts_and_nothing_is_proposed_meanwhile(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "READ_AT_ONCE", 16)
    model, reader = drafting(driver), draft_model.Reader()
    prompt = np.asarray(driver.tokens("one two three four five six seven eight " * 5), np.int32)
    proposed = [model.propose([Wish(reader, prompt, [], 2)])[0] for _ in range(-(-len(prompt) // 16))]
    assert not any(proposed[:-1])
    assert proposed[-1]
    model.leave(reader)


def test_without_room_for_a_text_nothing_is_proposed_and_answers_go_on(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftModel, "_room", lambda _: 8)
    request = driver.submit(STORY, max_tokens=3, ignore_eos=True, speculate=True)
    driver.until(lambda: (request, 0) in driver.finished)
    assert driver.finished[request, 0].drafted_tokens == 0
    assert drafting(driver).idle


def test_answers_with_drafts_that_are_cancelled_leave_nothing(driver: Driver) -> None:
    for turns in (1, 2, 5):
        request = driver.submit(STORY, max_tokens=200, ignore_eos=True, speculate=True)
        for _ in range(turns):
            driver.turn()
        driver.engine.tell(Cancel(request))
        driver.until(driver.idle)


def test_the_text_itself_is_asked_first_and_each_source_has_its_own_count(small_model: Model) -> None:
    both = SpeculationRules(draft=4, min_ngram=2, max_ngram=4, patience=3, probe=16)
    driver = make(small_model, slots=2, warm=0, speculation=both, draft=small_model)
    prompt = chat("Repeat this list twice, word for word: " + "apple, pear, plum, cherry, fig, grape, " * 2)
    request = driver.submit(prompt, max_tokens=30, ignore_eos=True, speculate=True)
    driver.until(lambda: (request, 0) in driver.finished)
    counters = driver.counters
    assert 0 < counters.model_drafted < counters.drafted == driver.finished[request, 0].drafted_tokens
    assert 0 < counters.model_accepted < counters.accepted
    assert 0 < counters.model_calls_saved < counters.calls_saved


class Gains:
    """Waits for nothing and keeps what comes."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def delta(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def progress(self, progress: object) -> None:
        pass


async def test_an_engine_host_loads_the_draft_model_beside_the_large_one(draft_gguf: Path) -> None:
    settings = LlmSettings(
        ctx=256, contexts=1, warm_prefixes=0, embedding_gguf="none", spec_draft=3, spec_draft_gguf=draft_gguf
    )
    (served,) = read_served(settings)
    engine = Engine(served.chat, EngineLimits(), SystemClock(), environ={}, on_state=lambda _: None)
    serving, gains = asyncio.create_task(engine.supervise()), Gains()
    prompt = pack_tokens(list(range(100, 120)))
    try:
        await engine._keeper.ready(wait_s=200)
        limits = Limits(max_tokens=12, ignore_eos=True)
        ticket = engine.submit(lambda number: Submit(number, prompt, GREEDY, limits, speculate=True), gains)
        await ticket.ended
        counters = await engine.counters(wait_s=60)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    assert counters.draft_calls > 0
    assert sum(delta.tokens for delta in gains.deltas) == 12


class _Tokens:
    """A vocabulary of so many tokens, spelled by a function."""

    def __init__(self, size: int, other: int = -1) -> None:
        self.size = size
        self._other = other

    def piece(self, token: int, *, special: bool) -> bytes:
        assert special
        return b"?" if token == self._other else str(token).encode()


def test_a_draft_model_of_another_vocabulary_is_refused_with_what_differs() -> None:
    check_vocabulary(_Tokens(100), _Tokens(120))  # type: ignore[arg-type]
    with pytest.raises(MisfitError, match="knows 100 tokens, the model 300"):
        check_vocabulary(_Tokens(100), _Tokens(300))  # type: ignore[arg-type]
    with pytest.raises(MisfitError, match="token 7 is b'\\?', the model's b'7'"):
        check_vocabulary(_Tokens(100, other=7), _Tokens(100))  # type: ignore[arg-type]
