"""What the ledger answers, call by call."""

import pytest
from msgspec import structs

from services.vram.core.ledger import Counts, Ledger, Past
from services.vram.core.model import (
    Ask,
    Denied,
    End,
    Facts,
    Failure,
    Item,
    KeyConflictError,
    Kind,
    Lease,
    Reading,
    RefusedError,
    Renewal,
    Report,
    Rules,
    Tier,
    UnknownDeviceError,
    UnknownLeaseError,
    Wanted,
    Why,
)

DEVICES = {name: Facts(name, "test", Kind.GPU) for name in ("gpu0", "gpu1")}


def ledger(free=(8000, 6000), **rules):
    made = Ledger(DEVICES, Rules(**{"keep_free_mib": 0, **rules}))
    look(made, free)
    return made


def look(made, free, at=0.0):
    readings = zip(DEVICES, free, strict=True)
    made.read({device: Reading(made.mark(), at, 10_000, mib) for device, mib in readings})


def ask(*items, tier=Tier.FREE, **fields):
    return Ask("t", tuple(items), tier, 10, **fields)


def on(device, size, least=None, has=0):
    return Wanted(device, size, size if least is None else least, has)


def lease(made, wanted, name="a", now=0.0, closed=None):
    return made.lease(wanted, name, made.arrive(), now, closed or {})


def test_all_devices_are_granted_together_or_none_is():
    ours = ledger()
    assert lease(ours, ask(on("gpu0", 8000), on("gpu1", 6001))).device == "gpu1"
    assert ours.accounts["gpu0"].room(Tier.FREE, ours.rules) == 8000
    granted = lease(ours, ask(on("gpu0", 8000), on("gpu1", 6000)))
    assert granted.items == (Item("gpu0", 8000), Item("gpu1", 6000))


def test_a_least_size_takes_what_is_there():
    ours = ledger()
    assert lease(ours, ask(on("gpu1", 9000, 5000))).items == (Item("gpu1", 6000),)
    assert lease(ours, ask(on("gpu1", 1000, 1)), "b").why is Why.NO_HEADROOM


def test_an_item_without_a_device_gets_the_roomiest_that_no_other_names():
    ours = ledger()
    assert lease(ours, ask(on("", 10))).items[0].device == "gpu0"
    granted = lease(ours, ask(on("", 10), on("gpu0", 10)), "b")
    assert [item.device for item in granted.items] == ["gpu1", "gpu0"]
    assert lease(ours, ask(on("", 1), on("", 1), on("", 1)), "c").why is Why.LARGER_THAN_DEVICE


def test_what_is_larger_than_the_device_is_told_apart_from_what_does_not_fit_now():
    ours = ledger()
    denied = lease(ours, ask(on("gpu0", 10_001)))
    assert (denied.why, denied.device) == (Why.LARGER_THAN_DEVICE, "gpu0")
    assert "10001 MiB" in denied.message
    denied = lease(ours, ask(on("gpu0", 9000)))
    assert (denied.why, denied.headroom_mib) == (Why.NO_HEADROOM, 8000)


def test_a_denial_tells_when_the_first_lease_may_end():
    ours = ledger()
    lease(ours, ask(on("gpu0", 8000)), now=1.0)
    assert lease(ours, ask(on("gpu0", 1)), "b", now=4.0).retry_after_s == 7.0


def test_memory_that_a_tenant_has_already_is_not_counted_twice():
    """A tenant whose lease was lost asks anew: the driver's figure has what it holds."""
    ours = ledger((3000, 0))
    wanted = ask(on("gpu0", 8000, has=6000))
    arrived = ours.arrive()
    assert ours.lease(wanted, "a", arrived, 0.0, {}).why is Why.NO_HEADROOM, "the figure may be from before"
    look(ours, (3000, 0))
    assert isinstance(ours.lease(wanted, "a", arrived, 0.0, {}), Lease)
    assert ours.accounts["gpu0"].room(Tier.FREE, ours.rules) == 1000


def test_memory_that_a_tenant_has_can_be_leased_even_when_nothing_is_left():
    ours = ledger((0, 0), keep_free_mib=1000)
    wanted = ask(on("gpu0", 500, has=500))
    arrived = ours.arrive()
    look(ours, (0, 0))
    assert isinstance(ours.lease(wanted, "a", arrived, 0.0, {}), Lease)


def test_the_same_key_answers_with_the_same_lease():
    ours = ledger()
    wanted = ask(on("gpu0", 5000), key="k", digest="1")
    first = lease(ours, wanted)
    assert lease(ours, wanted, "b") == first
    assert ours.counts.granted == 1
    with pytest.raises(KeyConflictError, match="differently"):
        lease(ours, structs.replace(wanted, digest="2"), "b")
    other = structs.replace(wanted, tenant="u")
    assert lease(ours, other, "b").why is Why.NO_HEADROOM
    ours.release("a", End.DONE, 0.0)
    look(ours, (8000, 6000))
    assert lease(ours, wanted, "c").lease_id == "c"


def test_a_renewal_starts_the_ttl_anew_and_asks_nobody_for_room():
    ours = ledger()
    lease(ours, ask(on("gpu0", 8000)))
    look(ours, (0, 0))
    renewed = ours.renew("a", Renewal(), 9.0)
    assert (renewed.ends_at, renewed.renewals, renewed.items) == (19.0, 1, (Item("gpu0", 8000),))
    assert ours.get("a") == renewed
    assert ours.renew("a", Renewal(ttl_s=2), 9.0).ends_at == 11.0
    with pytest.raises(UnknownLeaseError):
        ours.renew("a", Renewal(), 11.0)
    assert ours.counts.ended[End.EXPIRED] == 1


def test_a_smaller_size_gives_the_difference_back_and_a_larger_one_is_refused():
    ours = ledger()
    lease(ours, ask(on("gpu0", 8000)))
    assert ours.renew("a", Renewal((Report("gpu0", size_mib=3000),)), 0.0).items == (Item("gpu0", 3000),)
    look(ours, (8000, 0))
    assert ours.accounts["gpu0"].room(Tier.FREE, ours.rules) == 5000
    with pytest.raises(RefusedError, match=r"3001 MiB are asked for and 3000 MiB are leased") as refused:
        ours.renew("a", Renewal((Report("gpu0", size_mib=3001),)), 0.0)
    assert refused.value.field == "items[0].size_mib"
    with pytest.raises(RefusedError, match="holds nothing on 'gpu1'"):
        ours.renew("a", Renewal((Report("gpu1"),)), 0.0)


def test_a_device_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(UnknownDeviceError, match="no device 'gpu7'; there are gpu0, gpu1"):
        lease(ledger(), ask(on("gpu7", 1)))


def test_nothing_is_granted_while_nobody_knows_what_is_free():
    ours = ledger()
    ours.read({"gpu0": Failure("the card fell off the bus", 5.0)})
    denied = lease(ours, ask(on("gpu0", 1)), now=2.0)
    assert (denied.why, denied.retry_after_s, denied.headroom_mib) == (Why.DRIVER_UNKNOWN, 3.0, None)
    assert "fell off the bus" in denied.message
    assert isinstance(lease(ours, ask(on("gpu1", 1))), Lease)


def test_nothing_is_granted_while_old_leases_may_live_but_what_is_known_is_renewed():
    old = Lease("a", "t", (Item("gpu0", 1000),), Tier.FREE, 10, 0.0, 10.0)
    ours = Ledger(DEVICES, Rules(keep_free_mib=0), Past((old,), Counts(), settles_at=100.0))
    look(ours, (8000, 8000))
    denied = lease(ours, ask(on("gpu0", 1)), "b", now=9.0)
    assert (denied.why, denied.retry_after_s) == (Why.SETTLING, 91.0)
    assert ours.renew("a", Renewal(), 9.0).lease_id == "a"
    assert isinstance(lease(ours, ask(on("gpu0", 1)), "b", now=100.0), Lease)


def test_a_broker_that_is_switched_off_denies_and_still_knows_its_leases():
    ours = ledger(enabled=False)
    assert lease(ours, ask(on("gpu0", 1))).why is Why.DISABLED


def test_declared_growth_is_not_granted_to_others():
    ours = ledger(reserved_mib={"gpu0": 2048})
    assert isinstance(lease(ours, ask(on("gpu0", 5953))), Denied)
    assert isinstance(lease(ours, ask(on("gpu0", 5952))), Lease)


def test_devices_that_come_later_carry_the_leases_that_name_them():
    old = Lease("a", "t", (Item("gpu1", 1000),), Tier.FREE, 10, 0.0, 10.0)
    ours = Ledger({"gpu0": DEVICES["gpu0"]}, Rules(keep_free_mib=0), Past((old,)))
    ours.know(DEVICES)
    look(ours, (8000, 8000))
    assert ours.accounts["gpu1"].room(Tier.FREE, ours.rules) == 7000


def test_the_latest_denials_are_kept_newest_first():
    ours = ledger()
    for number in range(70):
        asked = ask(on("gpu0", 9000), purpose=str(number))
        ours.deny(asked, lease(ours, asked), float(number))
    assert [refusal.ask.purpose for refusal in ours.denials] == [str(number) for number in range(69, 5, -1)]
    assert ours.counts.denied[Why.NO_HEADROOM] == 70


def test_two_tenants_that_race_for_the_same_bytes_never_both_get_them():
    ours = ledger((5000, 0))
    for number in range(10_000):
        names = (f"{number}a", f"{number}b") if number % 2 else (f"{number}b", f"{number}a")
        results = [lease(ours, ask(on("gpu0", 3000)), name) for name in names]
        assert [isinstance(result, Lease) for result in results] == [True, False]
        if number % 3 == 0:  # it allocates, so that the bytes show in the driver's figure only
            ours.renew(names[0], Renewal((Report("gpu0", 3000),)), 0.0)
            look(ours, (2000, 0))
            assert isinstance(lease(ours, ask(on("gpu0", 3000)), names[1]), Denied)
        ours.release(names[0], End.DONE, 0.0)
        look(ours, (5000, 0))
