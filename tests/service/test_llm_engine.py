"""The engine on the real model, driven turn by turn: steps are counted, never timed."""

import threading
import time
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from services.llm.core import patience
from services.llm.core.patience import Patience
from services.llm.core.wire import (
    Announce,
    Cancel,
    Dry,
    Mirostat,
    Sampling,
    Xtc,
)
from services.llm.host.llama import Model
from tests.fixtures.amounts import amount
from tests.fixtures.engine import SLOTS, Driver, chat, make


@pytest.fixture(scope="module")
def shared(whole_model: Model) -> Driver:
    return make(whole_model)


@pytest.fixture(scope="module")
def shared_quick(small_model: Model) -> Driver:
    return make(small_model)


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


FRANCE = chat("What is the capital of France?")
QUESTIONS = [
    chat(f"What is the capital of {country}?")
    for country in ("France", "Germany", "Japan", "Portugal", "Italy", "Russia", "Egypt", "Poland", "Greece", "Cuba")
]


def test_the_capital_of_france_is_paris(driver: Driver) -> None:
    assert "Paris" in driver.run(FRANCE)


def clear_answer(driver: Driver, question: str) -> str | None:
    """The greedy answer, if its best token is far ahead of the second everywhere.

    Then rounding in another batch shape, which llama.cpp does not promise to be the same, cannot change it.
    """
    request = driver.submit(question, max_tokens=12, logprobs=2)
    driver.until(lambda: (request, 0) in driver.finished)
    tokens = [each for delta in driver.deltas if delta.request == request for each in delta.logprobs]
    clear = all(each.best[0].logprob - each.best[1].logprob > 0.5 for each in tokens)
    return driver.texts[request, 0] if clear else None


def test_sixteen_at_once_say_what_each_says_alone(driver: Driver) -> None:
    found = ((question, clear_answer(driver, question)) for question in QUESTIONS)
    answers = dict(islice(((question, answer) for question, answer in found if answer is not None), 5))
    assert len(answers) >= 4
    questions = (list(answers) * SLOTS)[:SLOTS]
    requests = [driver.submit(question, max_tokens=12) for question in questions]
    driver.until(lambda: all((request, 0) in driver.finished for request in requests))
    assert [driver.texts[request, 0] for request in requests] == [answers[question] for question in questions]


def test_sixteen_share_each_step(quick: Driver) -> None:
    requests = [quick.submit(FRANCE, max_tokens=4, ignore_eos=True) for _ in range(SLOTS)]
    quick.turn()
    assert [s.pending is not None for s in quick.engine._roster.active] == [True] * SLOTS
    before = quick.counters.steps
    decoded = quick.counters.decode_tokens
    quick.turn()
    assert quick.counters.steps == before + 1
    assert quick.counters.decode_tokens == decoded + SLOTS
    quick.until(lambda: all((request, 0) in quick.finished for request in requests))


def test_a_cancelled_answer_frees_its_sequence_within_one_step(quick: Driver) -> None:
    kept = quick.submit(FRANCE, max_tokens=40, ignore_eos=True)
    dropped = quick.submit(FRANCE, max_tokens=400, ignore_eos=True)
    quick.until(lambda: len([s for s in quick.engine._roster.active if s.generated]) == 2)
    quick.engine.tell(Cancel(dropped))
    quick.turn()
    assert [s.submit.request for s in quick.engine._roster.active] == [kept]
    assert (dropped, 0) not in quick.finished


def test_a_cancelled_prompt_frees_its_sequence_within_one_step(quick: Driver) -> None:
    running = quick.submit(FRANCE, max_tokens=60, ignore_eos=True)
    quick.until(lambda: quick.texts.get((running, 0)))
    long = quick.submit("word " * 600, max_tokens=1)
    quick.until(lambda: any(s.prefilling and s.computed > 0 for s in quick.engine._roster.active))
    quick.engine.tell(Cancel(long))
    quick.turn()
    assert [s.submit.request for s in quick.engine._roster.active] == [running]


def test_a_waiting_request_that_is_cancelled_never_takes_a_slot(quick: Driver) -> None:
    running = [quick.submit(FRANCE, max_tokens=6, ignore_eos=True) for _ in range(SLOTS)]
    waiting = quick.submit(FRANCE, max_tokens=6)
    quick.turn()
    assert len(quick.engine._roster.waiting) == 1
    quick.engine.tell(Cancel(waiting))
    quick.until(lambda: all((request, 0) in quick.finished for request in running))
    assert (waiting, 0) not in quick.finished
    assert quick.idle()


def test_a_lone_prompt_is_given_up_in_the_middle_of_its_step(driver: Driver) -> None:
    long = driver.submit("word " * 500, max_tokens=1)
    before = driver.counters.steps
    thread = threading.Thread(target=driver.turn)
    thread.start()
    while not driver.engine._in_step and thread.is_alive():
        pass
    driver.engine.tell(Cancel(long))
    thread.join()
    assert driver.counters.steps == before, "the step was not computed to its end"
    driver.turn()
    assert driver.idle()
    assert "Paris" in driver.run(FRANCE), "the context is sound afterwards"


def test_what_comes_while_a_step_runs_is_in_the_next(quick: Driver) -> None:
    first = quick.submit(FRANCE, max_tokens=30, ignore_eos=True)
    quick.until(lambda: quick.texts.get((first, 0)))
    second = quick.submit(FRANCE, max_tokens=2)
    quick.turn()
    assert {s.submit.request for s in quick.engine._roster.active} == {first, second}


@pytest.fixture
def patient(quick: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(patience, "LEAST_S", 60.0)
    quick.engine._patience = Patience(left_s=60.0, since_s=time.perf_counter())
    return quick


def test_a_request_that_is_on_its_way_is_computed_with_the_one_that_came_before_it(patient: Driver) -> None:
    patient.engine.tell(Announce(1))
    first = patient.submit(FRANCE)
    steps = patient.counters.steps

    def late() -> None:
        patient.submit(QUESTIONS[1])
        patient.engine.tell(Announce(-1))

    sender = threading.Thread(target=late)
    sender.start()
    patient.turn()
    sender.join()
    assert patient.counters.steps == steps + 1
    assert patient.counters.active == 2
    patient.until(lambda: (first, 0) in patient.finished)


def test_a_request_that_does_not_come_after_all_is_waited_for_no_longer(patient: Driver) -> None:
    patient.engine.tell(Announce(1))
    patient.submit(FRANCE)
    sender = threading.Thread(target=lambda: patient.engine.tell(Announce(-1)))
    sender.start()
    patient.turn()
    sender.join()
    assert patient.counters.active == 1


def test_a_request_that_is_announced_and_never_heard_of_again_stops_nobody(driver: Driver) -> None:
    driver.engine.tell(Announce(1))
    assert "Paris" in driver.run(FRANCE)
    driver.engine.tell(Announce(-1))
    driver.turn()


def test_who_is_cancelled_while_others_are_waited_for_leaves_at_once(patient: Driver) -> None:
    patient.engine.tell(Announce(1))
    patient.engine.tell(Cancel(patient.submit(FRANCE)))
    patient.turn()
    assert patient.idle()
    patient.engine.tell(Announce(-1))
    patient.turn()


def test_a_prompt_beside_running_answers_comes_in_pieces(driver: Driver) -> None:
    running = driver.submit(FRANCE, max_tokens=200, ignore_eos=True)
    driver.until(lambda: driver.texts.get((running, 0)))
    driver.turn()
    long = driver.submit("word " * 240, max_tokens=1)
    pieces = 0
    while (long, 0) not in driver.finished:
        before = driver.counters.decode_tokens
        driver.turn()
        pieces += 1
        assert driver.counters.decode_tokens > before, "the running answer went on in every step"
    assert pieces > 1
    driver.engine.tell(Cancel(running))


def test_a_repeated_prompt_is_not_computed_again(quick: Driver) -> None:
    cold = quick.run(FRANCE, reuse=True)
    prefilled = quick.counters.prefill_tokens
    request = quick.submit(FRANCE, reuse=True)
    quick.until(lambda: (request, 0) in quick.finished)
    length = len(quick.tokens(FRANCE))
    assert quick.finished[request, 0].cached_tokens == length - 1
    assert quick.counters.prefill_tokens == prefilled + 1
    assert quick.texts[request, 0] == cold


def test_a_conversation_goes_on_from_its_last_answer(driver: Driver) -> None:
    answer = driver.run(FRANCE, reuse=True)
    longer = FRANCE + answer + "<|im_end|>\n<|im_start|>user\nAnd of Germany?<|im_end|>\n<|im_start|>assistant\n"
    request = driver.submit(longer, reuse=True)
    driver.until(lambda: (request, 0) in driver.finished)
    cached = driver.finished[request, 0].cached_tokens
    assert cached >= len(driver.tokens(FRANCE + answer)) - 1
    warm = driver.texts[request, 0]
    assert driver.run(longer, reuse=False) == warm


def test_an_edit_in_the_middle_shares_only_what_comes_before_it(driver: Driver) -> None:
    driver.run(FRANCE, reuse=True)
    edited = chat("What is the capital of Germany?")
    request = driver.submit(edited, reuse=True)
    driver.until(lambda: (request, 0) in driver.finished)
    pairs = zip(driver.tokens(FRANCE), driver.tokens(edited), strict=False)
    common = next(place for place, (one, other) in enumerate(pairs) if one != other)
    assert driver.finished[request, 0].cached_tokens == common
    assert "Berlin" in driver.texts[request, 0]


def test_who_asks_for_no_reuse_leaves_nothing_and_takes_nothing(quick: Driver) -> None:
    quick.run(FRANCE, reuse=False)
    assert quick.engine._roster.cells.used == 0
    quick.run(FRANCE, reuse=True)
    request = quick.submit(FRANCE, reuse=False)
    quick.until(lambda: (request, 0) in quick.finished)
    assert quick.finished[request, 0].cached_tokens == 0


def test_several_choices_compute_the_prompt_once(quick: Driver) -> None:
    prefilled = quick.counters.prefill_tokens
    request = quick.submit(FRANCE, sampling=Sampling(temperature=1.0, seed=7), choices=4, max_tokens=8)
    quick.until(lambda: all((request, choice) in quick.finished for choice in range(4)))
    assert quick.counters.prefill_tokens - prefilled == len(quick.tokens(FRANCE)) + 3
    assert len({quick.texts[request, choice] for choice in range(4)}) > 1, "each choice draws by itself"


def test_a_seed_repeats_the_answer_and_another_changes_it(quick: Driver) -> None:
    prompt = chat("Tell me a story about a dog.")
    drawn = [quick.run(prompt, sampling=Sampling(temperature=1.0, seed=seed), max_tokens=12) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_stop_string_ends_the_answer_and_is_not_shown(driver: Driver) -> None:
    whole = driver.run(chat("Count from one to five in words."), max_tokens=24)
    words = whole.split()
    stop = f"{words[2][-2:]} {words[3][:2]}"  # over a token border
    request = driver.submit(chat("Count from one to five in words."), max_tokens=24, stop=(stop,))
    driver.until(lambda: (request, 0) in driver.finished)
    finish = driver.finished[request, 0]
    assert (finish.reason, finish.stop_string) == ("stop", stop)
    assert driver.texts[request, 0] == whole[: whole.index(stop)]
    assert finish.completion_tokens < 24


def test_max_tokens_is_exact_and_says_length(quick: Driver) -> None:
    request = quick.submit(FRANCE, max_tokens=5, ignore_eos=True)
    quick.until(lambda: (request, 0) in quick.finished)
    finish = quick.finished[request, 0]
    assert (finish.reason, finish.completion_tokens) == ("length", 5)
    assert sum(delta.tokens for delta in quick.deltas if delta.request == request) == 5


def test_without_ignore_eos_the_model_ends_by_itself(driver: Driver) -> None:
    request = driver.submit(FRANCE, max_tokens=60)
    driver.until(lambda: (request, 0) in driver.finished)
    assert driver.finished[request, 0].reason == "stop"
    assert "<|im_end|>" not in driver.texts[request, 0]


def test_logprobs_come_for_every_token_and_greedy_takes_the_best(quick: Driver) -> None:
    request = quick.submit(FRANCE, max_tokens=6, logprobs=3)
    quick.until(lambda: (request, 0) in quick.finished)
    found = [each for delta in quick.deltas if delta.request == request for each in delta.logprobs]
    assert len(found) == quick.finished[request, 0].completion_tokens
    for each in found:
        assert each.logprob <= 0
        assert len(each.best) == 3
        assert each.best[0].token == each.token
        assert each.best[0].logprob == each.logprob
        assert [one.logprob for one in each.best] == sorted((one.logprob for one in each.best), reverse=True)


def test_a_prompt_s_tokens_are_as_likely_as_they_were_when_the_model_chose_them(driver: Driver) -> None:
    chosen = driver.submit(
        FRANCE + "word " * 90, max_tokens=40, ignore_eos=True, logprobs=2
    )  # longer than one step tells of
    driver.until(lambda: (chosen, 0) in driver.finished)
    answer = [each for delta in driver.deltas if delta.request == chosen for each in delta.logprobs]
    prompt = [*driver.tokens(FRANCE + "word " * 90), *(each.token for each in answer)]
    echoed = driver.submit(prompt, max_tokens=2, choices=2, logprobs=2, tells_prompt=True, reuse=True, ignore_eos=True)
    driver.until(lambda: {(echoed, 0), (echoed, 1)} <= driver.finished.keys())
    told = driver.readings[echoed]
    assert [each.token for each in told] == prompt
    assert told[0].logprob is None
    assert not told[0].best
    for one, other in zip(told[-len(answer) :], answer, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=0.3)  # another batch shape
        assert one.piece == other.piece
    assert sum(each.best[0].token == each.token for each in told[-len(answer) :]) >= 36
    assert driver.texts[echoed, 0] == driver.texts[echoed, 1]
    again = driver.submit(prompt, max_tokens=0, logprobs=0, tells_prompt=True, reuse=True)
    driver.until(lambda: (again, 0) in driver.finished)
    likely = [each.logprob for each in driver.readings[again][1:]]
    assert likely == pytest.approx([each.logprob for each in told[1:]], abs=0.3, rel=0.05)
    assert (driver.finished[again, 0].completion_tokens, driver.finished[again, 0].reason) == (0, "length")


def test_prompts_that_tell_of_themselves_share_steps_with_answers_and_are_cancelled_like_others(driver: Driver) -> None:
    running = driver.submit(FRANCE, max_tokens=40, ignore_eos=True)
    driver.until(lambda: driver.texts.get((running, 0)))
    telling = [driver.submit(f"{number} " * 100, max_tokens=1, logprobs=0, tells_prompt=True) for number in range(3)]
    driver.turn()
    driver.engine.tell(Cancel(telling[1]))
    driver.until(lambda: all((each, 0) in driver.finished for each in (running, telling[0], telling[2])))
    assert telling[1] not in driver.readings
    assert all(len(driver.readings[each]) > 100 for each in (telling[0], telling[2]))


def test_an_unlikely_answer_stops_at_its_min_probability(driver: Driver) -> None:
    request = driver.submit(chat("Tell me a story."), max_tokens=200, min_probability=0.01)
    driver.until(lambda: (request, 0) in driver.finished)
    finish = driver.finished[request, 0]
    assert finish.reason == "min_probability"
    assert finish.completion_tokens < 200


def test_a_bias_forbids_a_token(driver: Driver) -> None:
    paris = driver.tokens(" Paris")[0]
    assert " Paris" not in driver.run(FRANCE, sampling=Sampling(temperature=0.0, logit_bias={paris: -100.0}))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=1),
        Sampling(temperature=0.7, min_p=0.1, seed=1),
        Sampling(temperature=1.0, typical_p=0.9, seed=1),
        Sampling(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, seed=1),
        Sampling(temperature=0.0, repetition_penalty=1.1, penalty_window=-1),
        Sampling(temperature=1.0, xtc=Xtc(0.5, 0.1), seed=1),
        Sampling(temperature=1.0, mirostat=Mirostat(1, 5.0, 0.1), seed=1),
        Sampling(temperature=1.0, mirostat=Mirostat(2, 5.0, 0.1), seed=1),
        Sampling(temperature=0.0, dry=Dry(0.8, 1.75, 2, -1, ("\n", ":"))),
    ],
    ids=lambda sampling: ",".join(
        name for name in sampling.__struct_fields__ if getattr(sampling, name) != getattr(Sampling(), name)
    ),
)
def test_every_sampling_option_answers_and_repeats_with_its_seed(quick: Driver, sampling: Sampling) -> None:
    answers = [quick.run(FRANCE, sampling=sampling, max_tokens=8, ignore_eos=True) for _ in range(2)]
    assert answers[0]
    assert answers[0] == answers[1]


def test_one_candidate_is_the_greedy_one(quick: Driver) -> None:
    greedy = quick.run(FRANCE)
    assert quick.run(FRANCE, sampling=Sampling(temperature=1.0, top_k=1)) == greedy
    assert quick.run(FRANCE, sampling=Sampling(temperature=1.0, top_p=1e-6)) == greedy
    assert quick.run(FRANCE, sampling=Sampling(temperature=1.0, min_p=1.0)) == greedy


def test_requests_cancelled_anywhere_leave_nothing(small_model: Model) -> None:
    driver = make(small_model, cells=4096, batch=128)  # too few cells for all; most prompts take several steps
    chance = Random(5)
    open_requests: list[int] = []
    submitted, many = 0, amount(60, thorough=200)
    while submitted < many or open_requests:
        while len(open_requests) < 20 and submitted < many:
            length = chance.choice((1, 5, 20))
            open_requests.append(driver.submit(FRANCE * length, max_tokens=50, reuse=chance.random() < 0.5))
            submitted += 1
        driver.turn()
        for number in chance.sample(open_requests, k=min(7, len(open_requests))):
            driver.engine.tell(Cancel(number))
            open_requests.remove(number)
        open_requests = [number for number in open_requests if (number, 0) not in driver.finished]
    driver.turn()
    assert driver.idle()
    assert_nothing_leaked(driver)


def test_when_cells_run_out_the_newest_gives_way_and_comes_back_to_the_same_answer(small_model: Model) -> None:
    small = make(small_model, cells=256, slots=4, batch=64, warm=4)
    prompts = [chat(f"What is the capital of {country}?") for country in ("France", "Germany", "Japan", "Italy")]
    alone = [small.run(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
    requests = [small.submit(prompt, max_tokens=70, ignore_eos=True) for prompt in prompts]
    small.until(lambda: all((request, 0) in small.finished for request in requests))
    assert small.counters.preemptions > 0
    assert all(small.finished[request, 0].completion_tokens == 70 for request in requests)
    # Cells come back byte for byte; rounding may differ where other sequences shared a step, so the beginnings are compared.
    for request, text in zip(requests, alone, strict=True):
        assert small.texts[request, 0][:20] == text[:20]
    assert small.engine._roster.cells.used == 0


def test_the_important_ones_are_not_the_ones_that_give_way(small_model: Model) -> None:
    small = make(small_model, cells=256, slots=3, batch=64, warm=0)
    paid = small.submit(FRANCE, max_tokens=80, ignore_eos=True, rank=3)
    free = [small.submit(FRANCE, max_tokens=80, ignore_eos=True, rank=1) for _ in range(2)]
    suspended: set[int] = set()
    while not all((request, 0) in small.finished for request in (paid, *free)):
        small.turn()
        suspended |= {s.submit.request for s in small.engine._roster.suspended}
    assert suspended
    assert paid not in suspended
