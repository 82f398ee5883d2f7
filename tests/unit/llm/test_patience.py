"""How long a step may wait for requests that are on their way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.patience import LEAST_S, OF_A_STEP, SHARE, Patience, most_s


def test_a_long_step_is_put_off_longer_than_a_short_one():
    assert most_s(0.001) == LEAST_S
    assert most_s(3.0) == 3.0 * OF_A_STEP


def test_patience_that_was_used_up_comes_back_with_time_and_stays_bounded():
    spent = Patience(LEAST_S, since_s=10.0).waited(LEAST_S)
    assert spent.left_s == 0
    assert spent.at(10.5, LEAST_S).left_s == pytest.approx(0.5 * SHARE)
    assert spent.at(1000.0, LEAST_S).left_s == LEAST_S
    assert spent.at(1000.0, 1.0).left_s == 1.0


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 1)), max_size=50))
def test_waiting_never_takes_more_than_its_share_of_the_time(steps):
    patience, now_s, waited_s = Patience(), 0.0, 0.0
    for wish_s, work_s in steps:
        patience = patience.at(now_s, LEAST_S)
        wait_s = min(wish_s, patience.left_s)
        patience = patience.waited(wait_s)
        now_s, waited_s = now_s + wait_s + work_s, waited_s + wait_s
        assert waited_s <= SHARE * now_s + 1e-9
