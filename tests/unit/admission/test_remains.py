"""Slots of exchanges that outlive a restart stay theirs, however their number changes."""

import itertools

import hypothesis.strategies as st
from hypothesis import given

from services.admission.core.desk import SETTLING, Desk, Memory
from services.admission.core.model import Ask, Granted, Modality, PoolSpec, Rules, Tier
from services.admission.core.remains import Running, Use, Uses, choose_side, past
from services.admission.core.scheduler import Scheduler
from services.admission.core.snapshot import view

SETTLE_S = 3.0
LLM = Use("llm", "gpu0", Modality.LLM, 1)
IMAGE = Use("image", "gpu0", Modality.IMAGE, 4)
CPU = Use("default", "cpu", Modality.EMBEDDING, 2)


def desk(*uses: Use, slots: int = 4, sessions: tuple[tuple[str, str], ...] = ()) -> Desk:
    scheduler = Scheduler([PoolSpec("gpu0", slots), PoolSpec("cpu", 2)], Rules())
    past = Memory(sessions, (), uses)
    return Desk(scheduler, epoch=2, past=past, grace_s=5.0, settle_s=SETTLE_S, now=0.0)


def ask(units: int = 1) -> Ask:
    return Ask("gpu0", Modality.LLM, Tier.FREE, units, 100.0)


def in_use(house: Desk, pool: int = 0) -> int:
    return view(house.scheduler, 0.0)[pool].in_use


def granted(deliveries) -> list[int]:
    return [one.number for one in deliveries if isinstance(one.event, Granted)]


def tickets():
    return itertools.count(1_000)


def test_nothing_is_granted_before_the_exchanges_of_the_past_are_counted():
    house = desk(LLM)
    assert granted(house.ask(1, ask(), 0.1)) == []
    assert granted(house.count_past({"llm": 3}, tickets(), 0.2)) == [1]
    assert in_use(house) == 4


def test_a_slot_of_the_past_is_free_when_its_exchange_is_over():
    house, new = desk(LLM), tickets()
    house.count_past({"llm": 4}, new, 0.1)
    house.ask(1, ask(), 0.2)
    house.ask(2, ask(), 0.2)
    assert granted(house.count_past({"llm": 3}, new, 0.3)) == [1]
    assert granted(house.count_past({}, new, 0.4)) == [2]
    assert in_use(house) == 2
    assert not house.remains


def test_an_exchange_that_appears_late_is_counted_although_its_slot_is_taken():
    house, new = desk(LLM), tickets()
    house.count_past({}, new, 0.1)
    assert granted(house.ask(1, ask(4), 0.2)) == [1]
    house.count_past({"llm": 1}, new, 0.3)
    assert in_use(house) == 5
    house.ask(2, ask(), 0.4)
    assert granted(house.release(1, 0.5)) == [2]


def test_the_wait_for_the_count_is_over_after_its_time():
    house = desk(LLM)
    house.ask(1, ask(), 0.1)
    assert granted(house.advance(SETTLE_S)) == [1]
    assert not house.is_uncounted


def test_sessions_and_exchanges_are_both_waited_for():
    house = desk(LLM, sessions=(("s", "llm"),))
    house.ask(1, ask(), 0.1)
    assert granted(house.count_past({}, tickets(), 0.2)) == []
    assert granted(house.open_session("s", "llm", [], 0.3)) == [1]
    house = desk(LLM, sessions=(("s", "llm"),))
    house.ask(1, ask(), 0.1)
    assert granted(house.open_session("s", "llm", [], 0.3)) == []
    assert granted(house.count_past({}, tickets(), 0.4)) == [1]


def test_a_first_start_waits_for_nothing():
    house = desk()
    assert not house.is_uncounted
    assert SETTLING not in house.scheduler.holds


def test_what_routes_ask_for_is_remembered_and_each_change_only_once():
    house = desk()
    version = house.memory_version
    house.note_use("llm", ask())
    house.note_use("llm", ask())
    house.note_use("free of charge", ask(0))
    assert house.memory_version == version + 1
    house.note_use("llm", ask(3))
    assert house.memory().uses == (Use("llm", "gpu0", Modality.LLM, 3),)


def test_what_the_past_took_is_remembered_until_its_last_exchange_is_over():
    house, new = desk(IMAGE), tickets()
    assert house.memory().uses == (IMAGE,)
    house.count_past({"image": 1}, new, 0.1)
    house.note_use("image", ask(1))
    assert house.memory().uses == (IMAGE,)
    house.count_past({}, new, 0.2)
    assert house.memory().uses == (Use("image", "gpu0", Modality.LLM, 1),)


def test_an_upstream_that_nobody_knows_counts_as_the_dearest_of_each_pool():
    assert set(Uses([LLM, IMAGE, CPU]).of("new")) == {IMAGE, CPU}
    assert Uses([]).of("new") == []


def test_a_pool_that_has_shrunk_or_gone_does_not_stop_the_count():
    house = desk(IMAGE, Use("llm", "gpu9", Modality.LLM, 1), slots=2)
    house.count_past({"image": 1, "llm": 1}, tickets(), 0.1)
    assert in_use(house) == 2


def test_the_side_is_the_epochs_unless_only_the_other_is_free_of_the_past():
    nothing, some = {"llm": 0}, {"llm": 2}
    assert choose_side(2, Running(nothing, some)) == "e0"
    assert choose_side(2, Running(some, nothing)) == "e1"
    assert choose_side(2, Running(some, some)) == "e0"
    assert choose_side(3, Running(nothing, nothing)) == "e1"


def test_new_exchanges_on_a_side_with_old_ones_are_never_taken_for_old():
    assert past(Running({"llm": 2}, {"llm": 1}), "e0", {"llm": 2}) == {"llm": 3}
    assert past(Running({"llm": 9}, {}), "e0", {"llm": 2}) == {"llm": 2}
    assert past(Running({"llm": 1}, {}), "e0", {"llm": 2}) == {"llm": 1}
    assert past(Running({"llm": 9}, {}), "e0", {}) == {}


@given(
    counts=st.lists(
        st.dictionaries(st.sampled_from(["llm", "image", "default", "new"]), st.integers(0, 5)), min_size=1, max_size=20
    )
)
def test_slots_in_use_are_always_exactly_those_of_the_last_count(counts: list[dict[str, int]]):
    house, new = desk(LLM, IMAGE, CPU), tickets()
    for now, running in enumerate(counts, 1):
        house.count_past(running, new, float(now))
        llm, image, default, unknown = (running.get(name, 0) for name in ("llm", "image", "default", "new"))
        assert in_use(house) == llm + 4 * image + 4 * unknown
        assert in_use(house, 1) == 2 * default + 2 * unknown
    house.count_past({}, new, 99.0)
    assert (in_use(house), in_use(house, 1), bool(house.remains)) == (0, 0, False)
