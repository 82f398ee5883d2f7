import pytest

from services.admission.core.drain_rate import LONGEST_S, WINDOW_S, DrainRate


def test_nothing_is_promised_before_anything_has_drained():
    rate = DrainRate()
    rate.busy(0.0)
    assert rate.per_second(100.0) is None
    assert rate.seconds_for(3, 100.0) is None


def test_the_rate_is_permits_per_second_of_waiting():
    rate = DrainRate()
    rate.busy(0.0)
    for second in range(1, 11):
        rate.released(float(second))
    assert rate.per_second(10.0) == pytest.approx(1.0)
    assert rate.seconds_for(5, 10.0) == pytest.approx(5.0)


def test_a_quiet_pool_is_not_a_slow_one():
    rate = DrainRate()
    rate.busy(0.0)
    for second in range(1, 11):
        rate.released(float(second))
    rate.idle(10.0)
    rate.released(500.0)
    assert rate.per_second(1_000.0) == pytest.approx(1.0)


def test_a_stuck_pool_promises_less_and_less():
    rate = DrainRate()
    rate.busy(0.0)
    rate.released(1.0)
    soon, later = rate.seconds_for(1, 2.0), rate.seconds_for(1, 60.0)
    assert soon is not None
    assert later is not None
    assert later > soon
    assert rate.seconds_for(10_000, 60.0) == LONGEST_S


def test_old_times_weigh_less():
    rate = DrainRate()
    rate.busy(0.0)
    now = 0.0
    for _ in range(int(WINDOW_S)):
        now += 1.0
        rate.released(now)
    for _ in range(int(WINDOW_S) * 20):
        now += 0.1
        rate.released(now)
    assert 5.0 < (rate.per_second(now) or 0.0) <= 10.0
