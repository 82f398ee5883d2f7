from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.embed_plan import StepRoom, share_step

requests = st.lists(st.lists(st.integers(1, 600), max_size=30), max_size=12)
rooms = st.builds(StepRoom, st.integers(16, 512), st.integers(1, 64))


@given(requests, rooms)
def test_a_step_stays_within_its_room_unless_one_input_alone_is_larger(waiting, room) -> None:
    taken = share_step(waiting, room)
    lengths = [length for inputs, count in zip(waiting, taken, strict=True) for length in inputs[:count]]
    assert len(lengths) <= room.sequences
    assert sum(lengths) <= room.tokens or len(lengths) == 1
    assert bool(lengths) == any(waiting)


@given(requests, rooms)
def test_nobody_has_two_more_turns_than_another_who_still_waits_for_less(waiting, room) -> None:
    taken = share_step(waiting, room)
    left = [inputs[count] for inputs, count in zip(waiting, taken, strict=True) if count < len(inputs)]
    spare = room.tokens - sum(sum(inputs[:count]) for inputs, count in zip(waiting, taken, strict=True))
    if sum(taken) < room.sequences:
        assert all(length > spare for length in left) or not left


@given(requests, rooms)
def test_whoever_comes_first_is_always_served(waiting, room) -> None:
    taken = share_step(waiting, room)
    first = next((place for place, inputs in enumerate(waiting) if inputs), None)
    assert first is None or taken[first] >= 1


@given(requests, rooms)
def test_when_who_was_passed_over_goes_first_everything_is_computed_and_nobody_waits_longer_than_the_others_are_many(
    waiting, room
) -> None:
    line = deque((place, deque(inputs), 0) for place, inputs in enumerate(waiting) if inputs)
    while line:
        taken = share_step([inputs for _, inputs, _ in line], room)
        passed, served = [], []
        for (place, inputs, waits), count in zip(line, taken, strict=True):
            for _ in range(count):
                inputs.popleft()
            if not count:
                assert waits < len(waiting)
                passed.append((place, inputs, waits + 1))
            elif inputs:
                served.append((place, inputs, 0))
        line = deque([*passed, *served])


def test_a_short_request_rides_beside_a_huge_one() -> None:
    assert share_step([[100] * 256, [10]], StepRoom(tokens=512, sequences=64)) == [5, 1]


def test_a_short_input_rides_where_a_long_one_does_not_fit() -> None:
    assert share_step([[300], [300, 5], [100]], StepRoom(tokens=512, sequences=64)) == [1, 0, 1]


def test_an_input_longer_than_a_step_has_one_of_its_own() -> None:
    assert share_step([[900], [5]], StepRoom(tokens=512, sequences=64)) == [1, 0]
