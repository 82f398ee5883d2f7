from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.governor import DEFAULT_RULES, Governor, observe, start


def run(
    state: Governor, cost: Callable[[int], float], *, steps: int, now_s: float, tokens: int = 4
) -> tuple[Governor, float]:
    """Run steps whose time depends on the threads."""
    for _ in range(steps):
        seconds = cost(state.threads)
        now_s += seconds
        state = observe(state, tokens=tokens, seconds=seconds, now_s=now_s)
    return state, now_s


def idle(threads: int) -> float:
    return {1: 0.016, 2: 0.009}[threads]


def taken(threads: int) -> float:
    return {1: 0.017, 2: 0.6}[threads]


def test_on_idle_cores_all_threads_stay_and_it_asks_only_once() -> None:
    state = start(2, 0.0)
    state, now_s = run(state, idle, steps=3000, now_s=0.0)
    assert state.settled == 2
    assert state.questioned
    assert now_s == pytest.approx(3000 * idle(2) + idle(1) - idle(2))  # the first pair of steps says no


def test_steps_that_grow_with_the_answers_are_no_reason_to_ask() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=300, now_s=0.0)
    seen = set()
    for step in range(2000):
        seconds = idle(state.threads) * (1 + step / 1000)
        now_s += seconds
        state = observe(state, tokens=4, seconds=seconds, now_s=now_s)
        seen.add(state.threads)
    assert seen == {2}


def test_a_collapsed_step_drops_a_thread_at_once() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    state, _ = run(state, taken, steps=1, now_s=now_s)
    assert state.threads == 1


def test_steps_that_doubled_three_times_drop_a_thread() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    slower = lambda threads: {1: 0.012, 2: 0.02}[threads]  # noqa: E731
    state, now_s = run(state, slower, steps=2, now_s=now_s)
    assert state.threads == 2
    state, now_s = run(state, slower, steps=1, now_s=now_s)
    assert state.threads == 1
    state, _ = run(state, slower, steps=6, now_s=now_s)
    assert state.settled == 1


def test_one_hiccup_is_looked_into_and_changes_nothing() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    state = observe(state, tokens=4, seconds=0.5, now_s=now_s + 0.5)
    state, _ = run(state, idle, steps=8, now_s=now_s + 0.5)
    assert (state.settled, state.trial) == (2, None)


def test_a_trial_alternates_so_that_both_meet_the_same_conditions() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    state, now_s = run(state, lambda threads: 0.1, steps=1, now_s=now_s)
    order = []
    near = {1: 0.0095, 2: 0.009}
    # The whole machine gets slower and slower; the comparison is not fooled.
    for step in range(6):
        order.append(state.threads)
        seconds = near[state.threads] * (1 + step / 20)
        now_s += seconds
        state = observe(state, tokens=4, seconds=seconds, now_s=now_s)
    assert order == [1, 2, 1, 2, 1, 2]
    assert (state.settled, state.trial) == (2, None)


def test_a_batch_that_changes_all_the_time_does_not_keep_a_trial_going() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    tried = 0
    for step in range(2000):
        tokens = 4 + step % 3
        seconds = idle(state.threads) * tokens / 4
        tried += state.threads == 1
        now_s += seconds
        state = observe(state, tokens=tokens, seconds=seconds, now_s=now_s)
    assert state.settled == 2
    assert tried < 100


def test_a_rest_ends_a_trial_without_a_verdict_and_asks_soon() -> None:
    state, now_s = run(start(2, 0.0), taken, steps=300, now_s=0.0)
    assert state.settled == 1
    assert state.pause_s > DEFAULT_RULES.first_pause_s
    state, now_s = run(state, idle, steps=1, now_s=now_s + 20.0)
    assert state.trial is None or not state.trial.tried_s
    state, _ = run(state, idle, steps=60, now_s=now_s)
    assert state.settled == 2


def test_fewer_threads_that_are_hardly_faster_are_not_kept() -> None:
    """On a noisy machine three steps are easily a little faster by chance, and one thread of two costs nearly half."""
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    state, now_s = run(state, lambda threads: 0.1, steps=1, now_s=now_s)
    state, _ = run(state, lambda threads: {1: 0.0094, 2: 0.01}[threads], steps=6, now_s=now_s)
    assert (state.settled, state.trial) == (2, None)


def test_more_threads_that_are_much_faster_are_kept_after_one_pair_of_steps() -> None:
    state, now_s = run(start(2, 0.0), taken, steps=40, now_s=0.0)
    assert state.settled == 1
    while state.trial is None:
        state, now_s = run(state, idle, steps=1, now_s=now_s)
    state, _ = run(state, idle, steps=2, now_s=now_s)
    assert state.settled == 2


def test_one_slow_step_changes_nothing() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    state = observe(state, tokens=4, seconds=0.03, now_s=now_s)
    state, _ = run(state, idle, steps=5, now_s=now_s)
    assert state.threads == 2


def test_the_thread_comes_back_when_the_core_is_free_again() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    state, now_s = run(state, taken, steps=40, now_s=now_s)
    assert state.settled == 1
    state, _ = run(state, idle, steps=1000, now_s=now_s)
    assert state.settled == 2


def test_while_the_core_is_taken_asking_costs_little() -> None:
    state, now_s = run(start(2, 0.0), idle, steps=100, now_s=0.0)
    state, begin_s = run(state, taken, steps=40, now_s=now_s)
    state, end_s = run(state, taken, steps=6000, now_s=begin_s)
    assert state.settled == 1
    assert end_s - begin_s < 6000 * 0.017 * 1.1


def test_a_machine_that_was_never_calm_is_found_out_by_the_first_question() -> None:
    state, _ = run(start(2, 0.0), taken, steps=20, now_s=0.0)
    assert state.settled == 1


def test_it_starts_with_all_threads() -> None:
    assert [start(most, 0.0).threads for most in (1, 2, 16)] == [1, 2, 16]


def test_prefill_steps_and_single_threads_are_left_alone() -> None:
    state = start(2, 0.0)
    assert observe(state, tokens=512, seconds=9.0, now_s=9.0) is state
    alone = start(1, 0.0)
    assert observe(alone, tokens=1, seconds=9.0, now_s=9.0) is alone


@given(
    st.integers(1, 32),
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 10.0)), max_size=200),
)
def test_threads_are_always_between_one_and_all(most: int, steps: list[tuple[int, float]]) -> None:
    state, now_s = start(most, 0.0), 0.0
    for tokens, seconds in steps:
        now_s += seconds
        state = observe(state, tokens=tokens, seconds=seconds, now_s=now_s)
        assert 1 <= state.threads <= most
