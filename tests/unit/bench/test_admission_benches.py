"""What the benches of admission run and say."""

from bench.admission.scheduler import LENGTHS, pairs_per_second, release_cost
from bench.admission.streams import waits_by_tier


def test_every_ask_of_the_mix_is_given_back():
    assert pairs_per_second(2_000) > 0


def test_each_release_of_the_curve_hands_over_to_somebody_however_long_the_line():
    assert all(release_cost(length, 20) > 0 for length in LENGTHS[:3])


def test_waits_are_told_by_tier_with_how_much_shorter_the_paid_ones_are():
    waits = {"paid": [0.001] * 99 + [0.004], "free": [0.5] * 98 + [0.8, 0.8]}

    assert waits_by_tier(waits)[1:] == [
        "paid       100           1.0           4.0",
        "free       100         500.0         800.0",
        "p99 of free over p99 of paid: 200 (goal 20)",
    ]
