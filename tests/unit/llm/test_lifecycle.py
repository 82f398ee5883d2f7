import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.hosts.core.lifecycle import (
    TRANSITIONS,
    BackOff,
    Event,
    IllegalTransitionError,
    State,
    after,
    is_stuck,
)


def walk(*events: Event) -> State:
    state = State.AVAILABLE
    for event in events:
        state = after(state, event)
    return state


def test_a_model_is_loaded_dies_and_comes_back() -> None:
    assert walk(Event.START, Event.LOADED) is State.READY
    assert walk(Event.START, Event.LOADED, Event.DIED) is State.FAILED
    assert walk(Event.START, Event.LOADED, Event.DIED, Event.START, Event.LOADED) is State.READY


def test_a_load_may_fail_and_is_tried_again() -> None:
    assert walk(Event.START, Event.LOAD_FAILED, Event.START) is State.LOADING


def test_what_is_not_in_the_table_cannot_happen() -> None:
    for state in State:
        for event in Event:
            if (state, event) not in TRANSITIONS:
                with pytest.raises(IllegalTransitionError, match=event.value):
                    after(state, event)


def test_from_every_state_a_model_can_become_ready() -> None:
    reached = {State.READY}
    while True:
        more = {state for (state, _), following in TRANSITIONS.items() if following in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(State)


def test_the_first_restart_is_at_once_and_then_pauses_double() -> None:
    back_off = BackOff(first_s=0.5, most_s=30)
    assert [back_off.pause_s(failures) for failures in (1, 2, 3, 4)] == [0, 0.5, 1, 2]


@given(st.integers(0, 10_000))
def test_pauses_are_bounded_and_never_shrink(failures: int) -> None:
    back_off = BackOff()
    assert back_off.pause_s(failures) <= back_off.pause_s(failures + 1) <= back_off.most_s


def test_a_long_calm_forgets_earlier_failures() -> None:
    back_off = BackOff(calm_s=60)
    assert back_off.failures(7, served_s=61) == 1
    assert back_off.failures(7, served_s=10) == 8


def test_silence_is_only_trouble_while_there_is_work() -> None:
    assert is_stuck(active=1, silent_s=11, limit_s=10)
    assert not is_stuck(active=0, silent_s=1000, limit_s=10)
    assert not is_stuck(active=1, silent_s=9, limit_s=10)
    assert not is_stuck(active=1, silent_s=1e9, limit_s=0)
