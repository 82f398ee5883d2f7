"""Who makes room: a table of seats in, names out."""

from hypothesis import given
from hypothesis import strategies as st

from services.kit.hosts.core.eviction import could_free_mib, evict
from services.kit.hosts.core.seats import Phase, Policy, Seat, Waiter

POLICY = Policy(turn_s=3.0, linger_s=0.2)
NOW_S = 1000.0


def resident(need_mib: int, *, idle_s: float, load_s: float = 0.0, pinned: bool = False) -> Seat:
    seat = Seat(need_mib, pinned, 0.0, phase=Phase.RESIDENT)
    seat.used_s = NOW_S - idle_s
    seat.ready_s = NOW_S - 900
    seat.began_s = seat.ready_s - load_s
    return seat


def test_who_is_idle_longest_leaves_first() -> None:
    seats = {1: resident(50, idle_s=10), 2: resident(50, idle_s=60), 3: resident(50, idle_s=30)}
    assert evict(seats, 50, POLICY, NOW_S).leaving == (2,)
    assert evict(seats, 60, POLICY, NOW_S).leaving == (2, 3)


def test_of_two_that_are_about_as_idle_the_one_that_loads_in_no_time_leaves() -> None:
    seats = {1: resident(50, idle_s=40, load_s=60), 2: resident(50, idle_s=30, load_s=0.5)}
    assert evict(seats, 50, POLICY, NOW_S).leaving == (2,)


def test_what_is_expensive_to_load_leaves_all_the_same_when_it_is_idle_for_long() -> None:
    seats = {1: resident(50, idle_s=800, load_s=10), 2: resident(50, idle_s=5, load_s=0.5)}
    assert evict(seats, 50, POLICY, NOW_S).leaving == (1,)


def test_whose_room_the_others_make_superfluous_stays() -> None:
    seats = {1: resident(20, idle_s=60), 2: resident(80, idle_s=10)}
    assert evict(seats, 70, POLICY, NOW_S).leaving == (2,)


def test_a_load_for_nobody_is_the_first_to_go() -> None:
    loading = Seat(50, pinned=False, ttl_s=0.0, phase=Phase.LOADING)
    seats = {1: resident(50, idle_s=60), 2: loading}
    assert evict(seats, 50, POLICY, NOW_S).leaving == (2,)
    loading.waiters[1] = Waiter(1, NOW_S)
    assert evict(seats, 50, POLICY, NOW_S).leaving == (1,)


@st.composite
def tables(draw: st.DrawFn) -> dict[int, Seat]:
    seats = {}
    for key in range(draw(st.integers(0, 5))):
        seat = resident(draw(st.integers(1, 60)), idle_s=draw(st.floats(0, 100)), load_s=draw(st.floats(0, 50)))
        seat.ready_s = NOW_S - draw(st.floats(0, 100))
        seat.began_s = seat.ready_s - draw(st.floats(0, 20))
        seat.pinned, seat.held = draw(st.booleans()), draw(st.booleans())
        seat.phase = draw(st.sampled_from(Phase))
        seat.active = draw(st.integers(0, 2)) if seat.phase is Phase.RESIDENT else 0
        if draw(st.booleans()):
            seat.waiters[1] = Waiter(1, NOW_S)
        seats[key] = seat
    return seats


@given(tables(), st.integers(1, 150))
def test_never_the_pinned_the_held_or_who_is_at_work_and_never_in_vain(seats, missing_mib) -> None:
    eviction = evict(seats, missing_mib, POLICY, NOW_S)
    for key in eviction.leaving or ():
        seat = seats[key]
        assert (seat.pinned, seat.held, seat.active) == (False, False, 0)
        assert seat.phase is Phase.RESIDENT or (seat.phase is Phase.LOADING and not seat.waiters)
    if eviction.leaving is not None:
        assert sum(seats[key].need_mib for key in eviction.leaving) >= missing_mib
    if could_free_mib(seats) < missing_mib:
        assert (eviction.leaving, eviction.closing) == (None, ())
