"""Scenarios of one pool that deserve a name of their own; the machine test covers every order of steps."""

import pytest

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
from services.admission.core.snapshot import view

GPU = frozenset({"gpu0"})


def scheduler(slots: int = 4, **rules: object) -> Scheduler:
    return Scheduler([PoolSpec("gpu0", slots)], Rules(**rules))


def ask(tier: Tier = Tier.FREE, units: int = 1, **fields: object) -> Ask:
    return Ask("gpu0", fields.pop("modality", Modality.LLM), tier, units, fields.pop("wait_s", 100.0), **fields)


def granted(events) -> list[int]:
    return [event.ticket for event in events if isinstance(event, Granted)]


def test_a_cheap_ask_never_overtakes_an_expensive_one_that_waits():
    house = scheduler()
    assert granted(house.ask(1, ask(), 0.0)) == [1]
    house.ask(2, ask(units=4), 0.0)
    assert house.ask(3, ask(), 0.0)[0].position == 2
    assert granted(house.release(1, 1.0)) == [2]
    assert granted(house.release(2, 2.0)) == [3]


def test_the_leaving_of_a_blocked_head_lets_the_next_through():
    house = scheduler()
    house.ask(1, ask(), 0.0)
    house.ask(2, ask(units=4), 0.0)
    house.ask(3, ask(), 0.0)
    assert granted(house.release(2, 1.0)) == [3]


def test_a_paid_ask_that_fits_passes_a_free_one_that_does_not():
    house = scheduler()
    house.ask(1, ask(), 0.0)
    house.ask(2, ask(units=4), 0.0)
    assert granted(house.ask(3, ask(Tier.PAID), 0.0)) == [3]


def test_a_release_hands_over_to_as_many_as_fit():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    for ticket in (2, 3, 4, 5, 6):
        house.ask(ticket, ask(), 0.0)
    assert granted(house.release(1, 1.0)) == [2, 3, 4, 5]


def test_background_starts_alone_and_only_when_nobody_waits():
    house = scheduler()
    assert granted(house.ask(1, ask(Tier.BACKGROUND), 0.0)) == [1]
    assert isinstance(house.ask(2, ask(Tier.BACKGROUND), 0.0)[0], Queued)
    assert granted(house.ask(3, ask(), 0.0)) == [3]
    assert granted(house.release(1, 1.0)) == []
    assert granted(house.release(3, 2.0)) == [2]


def test_background_does_not_start_while_somebody_better_is_parked():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    house.ask(2, ask(units=4), 0.0)
    house.park([2], 0.0)
    house.ask(3, ask(Tier.BACKGROUND), 0.0)
    assert granted(house.release(1, 1.0)) == []
    assert granted(house.release(2, 2.0)) == [3]


def test_a_background_holder_is_asked_once_to_leave():
    house = scheduler()
    house.ask(1, ask(Tier.BACKGROUND, units=4), 0.0)
    events = house.ask(2, ask(Tier.SUB), 1.0)
    assert [event for event in events if isinstance(event, YieldRequested)] == [YieldRequested(1, Tier.SUB)]
    assert not [event for event in house.ask(3, ask(Tier.PAID), 2.0) if isinstance(event, YieldRequested)]


def test_a_holder_of_a_better_tier_is_never_asked_to_leave():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    assert len(house.ask(2, ask(Tier.PAID), 1.0)) == 1


def test_try_passes_nobody_who_waits_even_when_it_would_fit():
    house = scheduler()
    house.ask(1, ask(), 0.0)
    house.ask(2, ask(units=4), 0.0)
    [refused] = house.ask(3, ask(Tier.PAID, may_wait=False), 0.0)
    assert refused.refusal is Refusal.SATURATED
    house.park([2], 0.0)
    assert granted(house.ask(4, ask(Tier.PAID, may_wait=False), 0.0)) == [4]


def test_a_waiter_whose_time_is_over_is_not_granted_by_a_late_release():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    house.ask(2, ask(wait_s=1.0), 0.0)
    house.ask(3, ask(wait_s=9.0), 0.0)
    events = house.release(1, 2.0)
    assert granted(events) == [3]
    assert [event.refusal for event in events if isinstance(event, Rejected)] == [Refusal.ADMISSION_TIMEOUT]


def test_an_expired_wait_says_how_long_for_what_and_when_to_come_back():
    house = scheduler()
    house.ask(1, ask(units=3), 0.0)
    house.ask(2, ask(), 0.0)
    house.ask(3, ask(wait_s=20.0), 0.0)
    assert granted(house.release(2, 10.0)) == [3]
    house.ask(4, ask(wait_s=10.0), 10.0)
    [refused] = house.advance(20.0)
    assert "waited 10.0 s for 1 slots at tier free; 4 of 4 slots of gpu0 are in use" in refused.message
    assert refused.retry_after_s == pytest.approx(20.0)  # one permit came back in the 20 s somebody waited


def test_a_full_queue_refuses_but_not_who_need_not_wait():
    house = scheduler(max_queue=1)
    house.ask(1, ask(units=2), 0.0)
    house.ask(2, ask(units=4), 0.0)
    [refused] = house.ask(3, ask(units=1), 0.0)
    assert refused.refusal is Refusal.QUEUE_FULL
    assert "1 of at most 1" in refused.message
    assert granted(house.ask(4, ask(Tier.PAID, units=1), 0.0)) == [4]


def test_a_pool_without_slots_has_no_capacity():
    house = scheduler(slots=0)
    [refused] = house.ask(1, ask(units=0), 0.0)
    assert (refused.refusal, refused.retry_after_s) == (Refusal.NO_CAPACITY, None)


def test_who_takes_no_slots_waits_for_nobody_but_a_hold():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    house.ask(2, ask(units=1), 0.0)
    assert granted(house.ask(3, ask(units=0), 0.0)) == [3]
    house.hold(Hold("h", GPU, frozenset({Modality.VIDEO}), 60.0, ""), 0.0)
    assert isinstance(house.ask(4, ask(Tier.PAID, units=0, modality=Modality.VIDEO), 0.0)[0], Queued)
    assert granted(house.release_hold("h", 1.0)) == [4]


def test_a_hold_stops_its_modalities_and_lets_the_others_pass():
    house = scheduler()
    house.hold(Hold("h", GPU, frozenset({Modality.IMAGE}), 60.0, "hand-over"), 0.0)
    assert isinstance(house.ask(1, ask(units=4, modality=Modality.IMAGE), 0.0)[0], Queued)
    assert granted(house.ask(2, ask(), 0.0)) == [2]
    assert granted(house.release_hold("h", 1.0)) == []
    assert granted(house.release(2, 2.0)) == [1]


def test_a_refusal_during_a_hold_says_when_the_hold_ends():
    house = scheduler()
    house.hold(Hold("h", GPU, ALL_MODALITIES, 60.0, ""), 0.0)
    [refused] = house.ask(1, ask(may_wait=False), 15.0)
    assert refused.retry_after_s == 45.0


def test_a_hold_waits_for_all_but_the_permits_it_excludes():
    house = scheduler()
    house.ask(1, ask(), 0.0)
    house.ask(2, ask(), 0.0)
    hold = Hold("h", GPU, ALL_MODALITIES, 60.0, "", excluded=frozenset({1}))
    house.hold(hold, 0.0)
    assert house.in_flight(hold) == 1
    house.release(2, 1.0)
    assert house.in_flight(hold) == 0


def test_the_longer_of_two_holds_counts():
    house = scheduler()
    house.hold(Hold("long", GPU, ALL_MODALITIES, 60.0, ""), 0.0)
    house.hold(Hold("short", GPU, frozenset({Modality.LLM}), 5.0, ""), 0.0)
    [refused] = house.ask(1, ask(may_wait=False), 1.0)
    assert refused.retry_after_s == 59.0
    house.advance(5.0)
    assert house.ask(2, ask(may_wait=False), 6.0)[0].refusal is Refusal.SATURATED
    house.advance(60.0)
    assert granted(house.ask(3, ask(may_wait=False), 60.0)) == [3]


def test_a_parked_ask_keeps_its_place_and_blocks_nobody():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    house.ask(2, ask(units=4), 0.0)
    house.ask(3, ask(), 0.0)
    house.park([2], 1.0)
    assert granted(house.release(1, 2.0)) == [3]
    house.ask(4, ask(units=4), 3.0)
    house.ready(2, 4.0)
    assert granted(house.release(3, 5.0)) == [2]


def test_a_park_that_crosses_the_grant_changes_nothing():
    house = scheduler()
    house.ask(1, ask(), 0.0)
    assert house.park([1], 1.0) == []
    assert house.ready(1, 2.0) == []
    assert house.is_holding(1)


def test_ageing_serves_a_free_waiter_before_newer_paid_ones():
    house = scheduler(slots=1, ageing_s=10.0)
    house.ask(1, ask(), 0.0)
    house.ask(2, ask(), 1.0)
    house.advance(21.0)
    house.ask(3, ask(Tier.PAID), 21.0)
    assert granted(house.release(1, 22.0)) == [2]


def test_ageing_never_lifts_out_of_background():
    house = scheduler(slots=1, ageing_s=1.0)
    house.ask(1, ask(), 0.0)
    house.ask(2, ask(Tier.BACKGROUND), 0.0)
    house.ask(3, ask(), 50.0)
    house.advance(50.0)
    assert granted(house.release(1, 51.0)) == [3]


def test_an_adopted_permit_counts_even_when_its_slots_were_given_away():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    house.ask(2, ask(), 0.0)
    house.adopt(3, ask(units=2), 1.0)
    assert view(house, 1.0)[0].in_use == 6
    assert granted(house.release(1, 2.0)) == [2]
    assert view(house, 2.0)[0].in_use == 3


def test_draining_refuses_waiters_and_newcomers_and_leaves_holders_alone():
    house = scheduler()
    house.ask(1, ask(units=4), 0.0)
    house.ask(2, ask(), 0.0)
    house.ask(3, ask(), 0.0)
    house.park([3], 0.0)
    refused = house.drain(1.0)
    assert {(event.ticket, event.refusal) for event in refused} == {(2, Refusal.DRAINING), (3, Refusal.DRAINING)}
    assert house.ask(4, ask(), 2.0)[0].refusal is Refusal.DRAINING
    assert house.is_holding(1)
    assert house.release(1, 3.0) == []


def test_news_of_places_comes_page_by_page_and_only_to_whom_it_is_news():
    house = scheduler(slots=1)
    for ticket in range(1, 8):
        house.ask(ticket, ask(), 0.0)

    def news(seen: range, now: float) -> list[tuple[int, int]]:
        return [(one.ticket, one.position) for one in house.positions("gpu0", seen, now)]

    assert news(range(10), 0.1) == []  # most waits are over before
    assert news(range(10), 0.5) == [(2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6)]
    assert news(range(10), 1.5) == []
    house.release(1, 1.5)
    house.release(4, 1.5)
    assert news(range(2), 2.0) == [(3, 1), (5, 2)]
    assert news(range(2, 9), 2.0) == [(6, 3), (7, 4)]
    house.release(3, 2.5)
    assert news(range(9), 2.5) == []  # told half a second ago
    assert news(range(9), 3.0) == [(5, 1), (6, 2), (7, 3)]


def test_a_live_ticket_and_impossible_units_are_errors_of_the_caller():
    house = scheduler()
    house.ask(1, ask(), 0.0)
    for ticket, wanted in ((1, ask()), (2, ask(units=5)), (3, ask(units=-1))):
        with pytest.raises(ValueError, match=r"live already|slots asked"):
            house.ask(ticket, wanted, 0.0)


def test_counters_tell_each_end_of_a_wait_apart():
    house = scheduler(slots=1)
    house.ask(1, ask(), 0.0)
    house.ask(2, ask(wait_s=5.0), 0.0)
    house.ask(3, ask(), 0.0)
    house.ask(4, ask(), 0.0)
    house.release(3, 1.0)
    house.advance(5.0)
    house.release(1, 6.0)
    [free] = [tier for tier in view(house, 6.0)[0].tiers if tier.tier is Tier.FREE]
    assert (free.granted, free.rejected, free.timed_out, free.cancelled, free.waiting) == (2, 1, 1, 1, 0)
