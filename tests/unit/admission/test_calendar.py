from hypothesis import given
from hypothesis import strategies as st

from services.admission.core.calendar import GRAIN, Calendar


def test_nothing_is_due_in_an_empty_calendar():
    calendar = Calendar()
    assert calendar.next_due() is None
    assert calendar.pop_due(1e9) == []


def test_a_ticket_is_due_at_its_time_and_not_before():
    calendar = Calendar()
    calendar.add(1, 10.0)
    assert calendar.pop_due(9.999) == []
    assert calendar.pop_due(10.0) == [1]
    assert calendar.next_due() is None


def test_two_tickets_of_one_grain_come_each_at_its_own_time():
    calendar = Calendar()
    calendar.add(1, 10.001)
    calendar.add(2, 10.004)
    assert calendar.pop_due(10.002) == [1]
    assert calendar.next_due() == 10.004
    assert calendar.pop_due(10.004) == [2]


def test_looking_for_the_next_time_does_not_read_the_bucket():
    calendar = Calendar()
    for ticket in range(1000):
        calendar.add(ticket, 10.0 + ticket * 1e-6)
    bucket = calendar._buckets[int(10.0 / GRAIN)]

    class Unread(dict):
        def values(self):
            raise AssertionError("read through")

    calendar._buckets[int(10.0 / GRAIN)] = Unread(bucket)
    assert calendar.next_due() == 10.0


@given(
    st.lists(st.floats(0, 3), max_size=60),
    st.sets(st.integers(0, 59)),
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
)
def test_everything_comes_exactly_once_unless_removed(dues, removed, steps):
    calendar = Calendar()
    left = dict(enumerate(dues))
    for ticket, due in left.items():
        calendar.add(ticket, due)
    for ticket in removed & left.keys():
        calendar.remove(ticket, left.pop(ticket))
    now = 0.0
    for step in steps:
        now += step
        expected = {ticket for ticket, due in left.items() if due <= now}
        popped = calendar.pop_due(now)
        assert len(popped) == len(expected)
        assert set(popped) == expected
        left = {ticket: due for ticket, due in left.items() if ticket not in expected}
        due = calendar.next_due()
        if left:
            assert due is not None
            assert now < due + GRAIN
            assert due <= min(left.values())
