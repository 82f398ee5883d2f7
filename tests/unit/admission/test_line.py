"""Lanes and lines: places, and that coming back late costs no walk and leaves nothing behind."""

from hypothesis import given
from hypothesis import strategies as st

from services.admission.core.entry import Entry
from services.admission.core.line import Lane, Line
from services.admission.core.model import Ask, Modality, Tier


def entry(ticket: int, *, key: float | None = None, tier: Tier = Tier.FREE, modality: Modality = Modality.LLM) -> Entry:
    made = Entry(ticket, Ask("gpu0", modality, tier, 1, 10.0), 0.0)
    made.key = (0.0 if key is None else key, ticket)
    return made


def test_whoever_comes_back_stands_at_the_old_place():
    lane = Lane()
    first, second, third = (entry(ticket) for ticket in (1, 2, 3))
    for one in (first, second, third):
        lane.add(one)
    lane.remove(first)
    lane.remove(second)
    assert lane.head() is third
    lane.add(second)
    lane.add(first)
    assert lane.head() is first
    assert list(lane.in_order()) == [first, second, third]


def test_coming_and_going_behind_a_blocked_head_leaves_nothing_behind():
    lane = Lane()
    head, restless = entry(1), entry(2)
    lane.add(head)
    lane.add(entry(3))
    for _ in range(10_000):
        lane.add(restless)
        lane.remove(restless)
    assert lane.head() is head
    assert len(lane._late) <= 64


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=80), st.permutations(range(16)))
def test_a_lane_is_always_in_the_order_of_its_keys(steps, keys):
    entries = [entry(ticket, key=float(keys[ticket])) for ticket in range(16)]
    lane, inside = Lane(), set()
    for wanted, ticket in steps:
        if wanted and ticket not in inside:
            lane.add(entries[ticket])
            inside.add(ticket)
        elif not wanted and ticket in inside:
            lane.remove(entries[ticket])
            inside.discard(ticket)
        expected = sorted((entries[ticket] for ticket in inside), key=lambda one: one.key)
        assert list(lane.in_order()) == expected
        assert lane.head() is (expected[0] if expected else None)


def test_better_tiers_come_first_and_closed_modalities_are_passed_over():
    line = Line()
    free = entry(1, tier=Tier.FREE)
    image = entry(2, tier=Tier.PAID, modality=Modality.IMAGE)
    llm = entry(3, tier=Tier.PAID)
    for one in (free, image, llm):
        line.add(one)
    assert line.head(()) is image
    assert line.head({Modality.IMAGE}) is llm
    assert line.head({Modality.IMAGE, Modality.LLM}) is None
    assert list(line.in_order()) == [image, llm, free]
    assert line.served_before(Tier.PAID) == 2
    assert line.served_before(Tier.BACKGROUND) == 3
