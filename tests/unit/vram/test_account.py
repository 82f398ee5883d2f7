"""What is known of a lease's memory, and what of it counts."""

import pytest

from services.vram.core.account import Account
from services.vram.core.model import Facts, Failure, Held, Item, Kind, Lease, Reading, Rules, Source, Tier, floor_for

RULES = Rules(keep_free_mib=1024)


def account(free=8000, used=None, *, mark=0):
    made = Account(Facts("gpu0", "test", Kind.GPU))
    made.read(Reading(mark, 0.0, 10_000, free, used))
    return made


def lease(name="a", size=4000, *, reported=None, pid=0, baseline=0):
    item = Item("gpu0", size, reported, baseline)
    return Lease(name, "t", (item,), Tier.FREE, 10, 0.0, 10.0, pid=pid)


@pytest.mark.parametrize(
    ("tier", "floor"), [(Tier.PAID, 0), (Tier.SUB, 512), (Tier.FREE, 768), (Tier.BACKGROUND, 1024)]
)
def test_better_tiers_dip_deeper_into_the_floor(tier, floor):
    assert floor_for(tier, 1024) == floor
    assert account(5000).room(tier, RULES) == 5000 - floor


def test_a_floor_that_does_not_divide_is_never_rounded_in_favour_of_the_asker():
    assert [floor_for(tier, 7) for tier in (Tier.PAID, Tier.SUB, Tier.FREE, Tier.BACKGROUND)] == [0, 4, 6, 7]


def test_what_is_granted_counts_until_it_is_allocated():
    ours = account(8000)
    ours.grant(lease(), 1)
    assert ours.room(Tier.PAID, RULES) == 4000
    ours.change(lease(reported=4000), 2)
    assert ours.room(Tier.PAID, RULES) == 4000, "the figure at hand is older than the allocation"
    ours.read(Reading(2, 1.0, 10_000, 4000))
    assert ours.room(Tier.PAID, RULES) == 4000, "the driver's figure has it now; it is not counted twice"


def test_the_driver_tells_what_a_process_has_allocated_when_its_tenant_does_not():
    ours = account(8000)
    ours.grant(lease(pid=7), 1)
    ours.read(Reading(1, 1.0, 10_000, 5000, {7: 3000}))
    assert ours.held(lease(pid=7)) == Held("gpu0", 4000, 3000, Source.DRIVER)
    assert ours.room(Tier.PAID, RULES) == 4000


def test_what_the_tenant_says_beats_the_driver():
    ours = account(8000)
    ours.grant(lease(pid=7, reported=1000), 0)
    ours.read(Reading(1, 1.0, 10_000, 5000, {7: 3000}))
    assert ours.held(lease(pid=7, reported=1000)) == Held("gpu0", 4000, 1000, Source.TENANT)
    assert ours.room(Tier.PAID, RULES) == 2000


def test_what_a_process_had_before_its_lease_is_not_taken_for_the_lease():
    ours = account(8000, {7: 2000})
    assert ours.unaccounted_mib(7) == 2000
    ours.grant(lease(pid=7, baseline=2000), 0)
    ours.read(Reading(1, 1.0, 10_000, 8000, {7: 2000}))
    assert ours.room(Tier.PAID, RULES) == 4000
    ours.read(Reading(1, 2.0, 10_000, 4000, {7: 6000}))
    assert ours.room(Tier.PAID, RULES) == 4000


def test_two_leases_of_one_process_share_its_memory_the_older_first():
    ours = account(8000)
    first, second = lease("a", 3000, pid=7), lease("b", 3000, pid=7)
    ours.grant(first, 0)
    ours.grant(second, 0)
    ours.read(Reading(1, 1.0, 10_000, 4000, {7: 4000}))
    assert [ours.held(each).materialised_mib for each in (first, second)] == [3000, 1000]


def test_the_memory_of_a_lease_that_ended_is_free_when_the_driver_says_so():
    ours = account(8000)
    ours.grant(lease(), 0)
    ours.remove("a", 1)
    assert ours.room(Tier.PAID, RULES) == 4000, "it may have been allocated since the driver was asked"
    ours.read(Reading(0, 1.0, 10_000, 8000))
    assert ours.room(Tier.PAID, RULES) == 4000, "this one was asked before the lease ended"
    ours.read(Reading(1, 2.0, 10_000, 8000))
    assert ours.room(Tier.PAID, RULES) == 8000


def test_an_answer_that_is_late_is_not_believed():
    ours = account(8000, mark=5)
    ours.read(Reading(4, 1.0, 10_000, 9999))
    assert ours.room(Tier.PAID, RULES) == 8000


def test_nothing_is_known_while_the_driver_fails():
    ours = account(8000)
    ours.grant(lease(pid=7), 0)
    ours.fail(Failure("gone", 9.0))
    assert ours.room(Tier.PAID, RULES) is None
    assert ours.held(lease(pid=7)).source is Source.UNKNOWN
    assert ours.promised_mib == 4000
