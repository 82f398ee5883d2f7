"""Fair share inside a tier, seen through the scheduler."""

from collections import Counter

import pytest

from services.admission.core.fair_share import FairShare
from services.admission.core.model import Ask, Granted, Modality, PoolSpec, Rules, Tier
from services.admission.core.scheduler import Scheduler


def served(*, fair: bool, asks: list[tuple[str, int]], slots: int = 1) -> list[str]:
    """Queue (principal, units) behind a holder of the whole pool, then serve them all; return who was served, in order."""
    scheduler = Scheduler([PoolSpec("gpu0", slots)], Rules(fair_share=fair))
    scheduler.ask(0, Ask("gpu0", Modality.LLM, Tier.FREE, slots, 100.0), 0.0)
    principals = {}
    for ticket, (principal, units) in enumerate(asks, 1):
        principals[ticket] = principal
        scheduler.ask(ticket, Ask("gpu0", Modality.LLM, Tier.FREE, units, 100.0, principal), 0.0)
    order: list[str] = []
    holders = [0]
    while holders:
        events = scheduler.release(holders.pop(0), 1.0)
        holders += [event.ticket for event in events if isinstance(event, Granted)]
        order += [principals[event.ticket] for event in events if isinstance(event, Granted)]
    return order


def test_without_it_first_come_is_first_served():
    asks = [("flood", 1)] * 5 + [("alice", 1)] * 2
    assert served(fair=False, asks=asks) == ["flood"] * 5 + ["alice"] * 2


def test_with_it_a_flood_does_not_hold_up_anybody_else():
    asks = [("flood", 1)] * 5 + [("alice", 1)] * 2
    assert served(fair=True, asks=asks) == ["flood", "alice", "flood", "alice", "flood", "flood", "flood"]


def test_shares_are_counted_in_slots():
    order = served(fair=True, asks=[("big", 4)] * 8 + [("small", 1)] * 32, slots=4)
    half = Counter(order[: len(order) // 2])
    assert half["small"] / half["big"] == pytest.approx(4, rel=0.3)


def test_principals_of_the_past_are_forgotten():
    fair = FairShare()
    for number in range(10_000):
        fair.served(fair.arrived(f"p{number}", 1))
        fair.served(float(number + 1))
    assert len(fair._ends) < 200
