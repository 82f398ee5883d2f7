"""The arithmetic that every published ratio rests on."""

import pytest

from bench.measure import Spread, abba, ratio, spread, there_and_back


def test_a_spread_is_the_median_with_its_extremes():
    assert spread([3.0, 1.0, 10.0]) == Spread(median=3.0, least=1.0, greatest=10.0)


def test_nothing_measured_is_no_spread():
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_a_ratio_is_taken_round_by_round_so_one_disturbed_round_moves_one_ratio_only():
    ours = [100.0, 50.0, 98.0]
    theirs = [100.0, 50.0, 100.0]

    assert ratio(ours, theirs) == Spread(median=1.0, least=0.98, greatest=1.0)


def test_rounds_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_each_side_goes_first_in_every_other_round():
    assert [abba(index) for index in range(4)] == [(0, 1), (1, 0), (0, 1), (1, 0)]


def test_several_sides_are_measured_there_and_back():
    assert [there_and_back(index, 3) for index in range(3)] == [(0, 1, 2), (2, 1, 0), (0, 1, 2)]


def test_a_spread_is_shown_with_the_digits_asked_for():
    assert Spread(0.98, 0.9, 1.049).show(2) == "0.98 [0.90-1.05]"
