import pytest

from services.kit.clock import Clock, ManualClock, SystemClock


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_a_clock_never_goes_back(clock: Clock):
    readings = [clock.monotonic() for _ in range(100)]
    assert readings == sorted(readings)
    assert clock.wall() > 1_600_000_000


def test_a_manual_clock_moves_both_readings_and_only_when_told_to():
    clock = ManualClock(monotonic=5.0, wall=100.0)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)
    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)


def test_a_manual_clock_refuses_to_go_back():
    with pytest.raises(ValueError, match="-1"):
        ManualClock().advance(-1)
