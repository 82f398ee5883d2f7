"""How long a step may wait for requests that are on their way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.patience import MOST_S, SHARE, Patience


def test_patience_that_was_used_up_comes_back_with_time_and_stays_bounded():
    spent = Patience(MOST_S, since_s=10.0).waited(MOST_S)
    assert spent.left_s == 0
    assert spent.at(10.5).left_s == pytest.approx(0.5 * SHARE)
    assert spent.at(1000.0).left_s == MOST_S


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 1)), max_size=50))
def test_waiting_takes_its_share_of_the_time_and_one_full_patience_at_most(steps):
    patience, now_s, waited_s = Patience(), 0.0, 0.0
    for wish_s, work_s in steps:
        patience = patience.at(now_s)
        wait_s = min(wish_s, patience.left_s)
        patience = patience.waited(wait_s)
        now_s, waited_s = now_s + wait_s + work_s, waited_s + wait_s
        assert waited_s <= MOST_S + SHARE * now_s + 1e-9
