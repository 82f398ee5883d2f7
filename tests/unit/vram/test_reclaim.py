"""Whom to ask for memory back."""

from services.vram.core.model import Held, Item, Lease, Source, Tier
from services.vram.core.reclaim import Answer, Reason, Reclaim, Reclaims, choose


def candidate(name, mib, *, tier=Tier.FREE, cost=None, reclaimable=True, at=0.0):
    lease = Lease(name, name, (Item("gpu0", mib),), tier, 10, at, 10.0, reclaimable=reclaimable, reload_cost_s=cost)
    return lease, Held("gpu0", mib, mib, Source.TENANT)


def chosen(candidates, missing, *, tier=Tier.SUB, tenant="asker", spared=()):
    return [one.lease.lease_id for one in choose(candidates, missing, tier=tier, tenant=tenant, spared=spared)]


def test_the_worst_tier_is_asked_first_then_the_cheapest_to_load_again():
    candidates = [
        candidate("dear", 10, cost=9.0),
        candidate("cheap", 10, cost=1.0),
        candidate("unknown", 10),
        candidate("lowly", 10, tier=Tier.BACKGROUND, cost=99.0),
    ]
    assert chosen(candidates, 100) == ["lowly", "cheap", "dear", "unknown"]
    assert chosen(candidates, 15) == ["lowly", "cheap"]
    assert chosen(candidates, 0) == []


def test_better_tiers_the_asker_itself_and_who_did_not_offer_are_left_alone():
    candidates = [
        candidate("better", 10, tier=Tier.PAID),
        candidate("asker", 10),
        candidate("pinned", 10, reclaimable=False),
        candidate("busy", 10),
    ]
    assert chosen(candidates, 100, spared=["busy"]) == []
    assert chosen(candidates, 100, tier=Tier.PAID, tenant="x") == ["asker", "busy", "better"]


def test_who_refuses_is_not_asked_again_for_the_same_waiter():
    reclaims = Reclaims()
    reclaims.add(Reclaim("r", "a", "t", "gpu0", 5, Reason.TENANT_WAITS, Tier.SUB, ticket=1, until=9.0))
    assert reclaims.answer("r", Answer.WORKING) is None
    assert reclaims.expected_mib(1) == {"gpu0": 5}
    assert reclaims.of_lease("a").reclaim_id == "r"
    assert reclaims.answer("r", Answer.BUSY).lease_id == "a"
    assert reclaims.spared(1) == {"a"}
    assert reclaims.spared(2) == set()
    assert reclaims.forget_waiter(1) == []
    assert reclaims.spared(1) == set()


def test_a_request_ends_with_its_lease_its_waiter_or_its_time():
    reclaims = Reclaims()
    for name, ticket, until in (("a", 1, 9.0), ("b", 2, 9.0), ("c", 3, 5.0)):
        reclaims.add(Reclaim(name, name, "t", "gpu0", 5, Reason.TENANT_WAITS, Tier.SUB, ticket=ticket, until=until))
    assert [each.reclaim_id for each in reclaims.forget_lease("a")] == ["a"]
    assert [each.reclaim_id for each in reclaims.forget_waiter(2)] == ["b"]
    assert [each.reclaim_id for each in reclaims.expire(5.0)] == ["c"]
    assert reclaims.open == {}
    assert reclaims.spared(3) == {"c"}, "who did not answer in time is not asked again"
