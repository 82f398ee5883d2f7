"""Sessions, restarts and holds, without a clock or a socket."""

import pytest

from services.admission.core.desk import SETTLING, Delivery, Desk, Held, Memory
from services.admission.core.model import (
    ALL_MODALITIES,
    Ask,
    Granted,
    Hold,
    Modality,
    PoolSpec,
    Queued,
    Refusal,
    Rejected,
    Rules,
    Tier,
    YieldRequested,
)
from services.admission.core.scheduler import Scheduler
from services.admission.core.sessions import DuplicateAskError, SessionConflictError
from services.admission.core.snapshot import view

GRACE_S, SETTLE_S = 5.0, 3.0
NOTHING = Memory((), ())


def desk(
    past: Memory = NOTHING, *, slots: int = 2, epoch: int = 1, now: float = 0.0, settle_s: float = SETTLE_S
) -> Desk:
    scheduler = Scheduler([PoolSpec("gpu0", slots)], Rules())
    return Desk(scheduler, epoch=epoch, past=past, grace_s=GRACE_S, settle_s=settle_s, now=now)


def ask(units: int = 1, tier: Tier = Tier.FREE, wait_s: float = 100.0) -> Ask:
    return Ask("gpu0", Modality.LLM, tier, units, wait_s)


def held(ask_id: int, ticket: int, permit_id: str = "0-9", units: int = 1) -> tuple[int, Held]:
    return ticket, Held(ask_id, permit_id, ask(units))


def in_use(house: Desk) -> int:
    return view(house.scheduler, 0.0)[0].in_use


def grants(deliveries: list[Delivery]) -> list[tuple[str | None, int]]:
    return [(one.session_id, one.number) for one in deliveries if isinstance(one.event, Granted)]


def test_events_find_their_session_and_ask_or_their_single_caller():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    assert grants(house.session_ask("s", 7, 1, ask(), 0.0)) == [("s", 7)]
    assert grants(house.ask(2, ask(), 0.0)) == [(None, 2)]


def test_a_release_of_one_session_is_heard_by_another():
    house = desk()
    house.open_session("a", "llm", [], 0.0)
    house.open_session("b", "diffusion", [], 0.0)
    house.session_ask("a", 1, 1, ask(2), 0.0)
    house.session_ask("b", 1, 2, ask(), 0.0)
    assert grants(house.session_release("a", 1, 1.0)) == [("b", 1)]


def test_an_ask_id_that_is_live_is_refused_and_one_that_is_over_may_be_used_again():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(), 0.0)
    with pytest.raises(DuplicateAskError):
        house.session_ask("s", 1, 2, ask(), 0.0)
    house.session_release("s", 1, 1.0)
    assert house.session_release("s", 1, 1.0) == []
    assert grants(house.session_ask("s", 1, 3, ask(), 2.0)) == [("s", 1)]


def test_a_refused_ask_is_over():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(2), 0.0)
    house.session_ask("s", 2, 2, ask(wait_s=1.0), 0.0)
    [told] = house.advance(1.0)
    assert (told.session_id, told.number) == ("s", 2)
    assert isinstance(told.event, Rejected)
    house.session_ask("s", 2, 3, ask(), 2.0)


def test_a_session_is_open_once_and_belongs_to_one_service():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    with pytest.raises(SessionConflictError, match="open"):
        house.open_session("s", "llm", [], 1.0)
    house.lose_session("s", 2.0)
    with pytest.raises(SessionConflictError, match="belongs to llm"):
        house.open_session("s", "diffusion", [], 3.0)


def test_a_lost_session_keeps_its_permits_for_the_grace():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(2), 0.0)
    house.lose_session("s", 1.0)
    house.ask(2, ask(), 1.0)
    assert house.advance(5.9) == []
    assert house.next_due() == 6.0
    assert grants(house.advance(6.0)) == [(None, 2)]


def test_nothing_is_granted_to_a_lost_session():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.ask(1, ask(2), 0.0)
    house.session_ask("s", 1, 2, ask(), 0.0)
    house.ask(3, ask(), 0.0)
    house.lose_session("s", 1.0)
    assert grants(house.release(1, 2.0)) == [(None, 3)]


def test_whoever_waits_claims_the_old_place_after_the_loss():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.ask(1, ask(2), 0.0)
    house.session_ask("s", 1, 2, ask(2), 0.0)
    house.lose_session("s", 1.0)
    house.ask(3, ask(2), 2.0)
    house.open_session("s", "llm", [], 3.0)
    house.session_ask("s", 1, 4, ask(2), 3.0)
    assert grants(house.release(1, 4.0)) == [("s", 1)]


def test_a_place_that_nobody_claims_is_given_up_after_the_grace():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.ask(1, ask(2), 0.0)
    house.session_ask("s", 1, 2, ask(), 0.0)
    house.lose_session("s", 1.0)
    house.open_session("s", "llm", [], 2.0)
    house.advance(7.0)
    assert view(house.scheduler, 7.0)[0].waiting == 0
    assert house.next_due() is None
    house.session_ask("s", 1, 3, ask(), 8.0)


def test_what_a_session_does_not_bring_along_was_released_while_it_was_away():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(), 0.0)
    house.session_ask("s", 2, 2, ask(), 0.0)
    house.lose_session("s", 1.0)
    house.ask(3, ask(), 1.0)
    assert grants(house.open_session("s", "llm", [held(1, 8)], 2.0)) == [(None, 3)]
    assert in_use(house) == 2
    house.session_release("s", 1, 3.0)
    assert in_use(house) == 1


def test_what_is_brought_along_is_counted_before_anything_is_handed_over():
    house = desk(slots=2)
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(2), 0.0)
    house.lose_session("s", 1.0)
    house.ask(2, ask(2), 1.0)
    assert grants(house.open_session("s", "llm", [held(9, 8)], 2.0)) == []
    assert in_use(house) == 1


def test_what_is_still_held_never_changes_hands_when_its_session_comes_back():
    house = desk(slots=2)
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(2), 0.0)
    house.lose_session("s", 1.0)
    house.ask(2, ask(2), 1.0)
    assert grants(house.open_session("s", "llm", [held(1, 8, "1-1", units=2)], 2.0)) == []
    assert in_use(house) == 2


def test_a_session_that_ends_gives_everything_back_and_nothing_to_itself():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(2), 0.0)
    house.session_ask("s", 2, 2, ask(2), 0.0)
    house.ask(3, ask(2), 0.0)
    assert grants(house.end_session("s", 1.0)) == [(None, 3)]
    assert house.end_session("s", 2.0) == []
    assert house.memory() == NOTHING


def test_a_session_that_comes_back_after_its_grace_is_counted_over_the_slots():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(2), 0.0)
    house.lose_session("s", 0.0)
    house.ask(2, ask(2), 1.0)
    house.advance(5.0)
    house.open_session("s", "llm", [held(1, 8, "1-1", units=2)], 6.0)
    assert in_use(house) == 4
    house.ask(3, ask(), 7.0)
    assert grants(house.release(2, 8.0)) == []
    assert grants(house.session_release("s", 1, 9.0)) == [(None, 3)]


def test_after_a_restart_nothing_is_granted_until_every_known_session_is_back():
    house = desk(Memory((("a", "llm"), ("b", "diffusion")), ()), epoch=2)
    assert isinstance(house.ask(1, ask(), 0.0)[0].event, Queued)
    house.open_session("a", "llm", [held(1, 8)], 0.5)
    assert sorted(house.absent()) == ["b"]
    assert grants(house.open_session("b", "diffusion", [], 1.0)) == [(None, 1)]
    assert in_use(house) == 2


def test_after_a_restart_a_dead_session_is_not_waited_for():
    house = desk(Memory((("a", "llm"),), ()), epoch=2)
    house.ask(1, ask(), 0.0)
    assert grants(house.end_session("a", 0.1)) == [(None, 1)]


def test_after_a_restart_a_missing_session_is_waited_for_only_so_long():
    house = desk(Memory((("a", "llm"),), ()), epoch=2)
    house.ask(1, ask(), 0.0)
    assert house.next_due() == SETTLE_S
    assert house.memory().sessions == (("a", "llm"),)
    assert grants(house.advance(SETTLE_S)) == [(None, 1)]
    assert house.memory() == NOTHING


def test_a_restart_without_a_past_grants_at_once():
    assert grants(desk().ask(1, ask(), 0.0)) == [(None, 1)]


def test_who_may_not_wait_is_refused_while_admission_settles():
    house = desk(Memory((("a", "llm"),), ()), epoch=2)
    [told] = house.ask(1, ask()._replace(may_wait=False), 1.0)
    assert isinstance(told.event, Rejected)
    assert told.event.refusal is Refusal.SATURATED
    assert told.event.retry_after_s == 2.0


def test_holds_outlive_a_restart_and_settling_does_not():
    hold = Hold("h", frozenset({"gpu0"}), ALL_MODALITIES, 60.0, "hand-over")
    house = desk(Memory((("a", "llm"),), (hold,)), epoch=2)
    assert set(house.scheduler.holds) == {"h", SETTLING}
    assert house.memory().holds == (hold,)
    house.advance(SETTLE_S)
    assert isinstance(house.ask(1, ask(), 4.0)[0].event, Queued)
    assert grants(house.release_holds(["h"], 5.0)) == [(None, 1)]


def test_the_memory_changes_with_sessions_and_holds_and_with_nothing_else():
    house = desk()
    before = house.memory_version
    house.ask(1, ask(), 0.0)
    house.release(1, 1.0)
    assert house.memory_version == before
    versions = []
    for act in (
        lambda: house.open_session("s", "llm", [], 2.0),
        lambda: house.hold(Hold("h", frozenset({"gpu0"}), ALL_MODALITIES, 9.0, ""), 3.0),
        lambda: house.advance(9.0),
        lambda: house.end_session("s", 10.0),
    ):
        act()
        versions.append(house.memory_version)
    assert versions == sorted(set(versions))
    assert versions[0] > before


def test_permits_are_found_by_their_id_whichever_epoch_granted_them():
    house = desk(epoch=3)
    house.ask(5, ask(), 0.0)
    house.open_session("s", "llm", [held(1, 6, permit_id="2-44")], 0.0)
    assert house.permit_id(5) == "3-5"
    assert (house.ticket_of("3-5"), house.ticket_of("2-44")) == (5, 6)
    house.session_release("s", 1, 1.0)
    house.release(5, 1.0)
    assert (house.ticket_of("3-5"), house.ticket_of("2-44"), house.ticket_of("x")) == (None, None, None)


def test_a_session_parks_one_ask_and_the_next_is_served():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.ask(1, ask(2), 0.0)
    house.session_ask("s", 1, 2, ask(2), 0.0)
    house.session_ask("s", 2, 3, ask(2), 0.0)
    house.session_park("s", 1, 0.0)
    assert grants(house.release(1, 1.0)) == [("s", 2)]
    house.session_ready("s", 1, 2.0)
    assert grants(house.session_release("s", 2, 3.0)) == [("s", 1)]
    for act in (house.session_park, house.session_ready):
        assert act("s", 99, 4.0) == []


def test_a_background_permit_that_came_along_is_asked_to_yield_again():
    house = desk(Memory((("t", "jobs"),), ()), epoch=2)
    brought = (9, Held(1, "1-1", ask(2, Tier.BACKGROUND)))
    house.open_session("t", "jobs", [brought], 0.0)
    told = house.ask(1, ask(), 1.0)
    assert [(one.session_id, one.number) for one in told if isinstance(one.event, YieldRequested)] == [("t", 1)]


def test_a_long_line_hears_of_its_places_by_and_by():
    house = desk()
    house.ask(1, ask(2), 0.0)
    for ticket in range(2, 252):
        house.ask(ticket, ask(), 0.0)
    told: list[int] = []
    start = 0
    for _ in range(3):
        news, start = house.places("gpu0", start, 1.0)
        assert len(news) <= 100
        told += [one.event.position for one in news if isinstance(one.event, Queued)]
    assert told == list(range(1, 251))
    assert start >= 250


def test_draining_tells_every_waiter():
    house = desk()
    house.open_session("s", "llm", [], 0.0)
    house.session_ask("s", 1, 1, ask(2), 0.0)
    house.session_ask("s", 2, 2, ask(), 0.0)
    house.ask(3, ask(), 0.0)
    told = house.drain(1.0)
    assert sorted((one.session_id or "", one.number) for one in told) == [("", 3), ("s", 2)]
    house.session_ask("s", 2, 4, ask(), 2.0)
