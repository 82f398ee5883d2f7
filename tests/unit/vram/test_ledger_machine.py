"""Tenants that lease, allocate, report, shrink, leave and die in any order, a driver that is always late, a broker that restarts.

The world knows what is really free. What the ledger has promised beyond what is allocated must always be there, however
old the figures were on which it decided.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.vram.core.ledger import Ledger, Past
from services.vram.core.model import (
    Ask,
    Denied,
    End,
    Facts,
    Failure,
    Item,
    Kind,
    Lease,
    Reading,
    Renewal,
    Report,
    Rules,
    Tier,
    Wanted,
    floor_for,
)
from tests.fixtures.amounts import amount

TOTAL = 100
RULES = Rules(keep_free_mib=8, default_ttl_s=10, max_ttl_s=20, reserved_mib={"gpu0": 5})
DEVICES = {name: Facts(name, "test", Kind.GPU) for name in ("gpu0", "gpu1")}
SIZES = st.integers(1, 40)


class Tenant:
    """A process as it sees itself: its lease, and by device what it has really allocated and what it has told."""

    def __init__(self, lease: Lease, *, reports: bool) -> None:
        self.lease = lease
        self.reports = reports
        self.allocated = {item.device: 0 for item in lease.items}


class LedgerMachine(RuleBasedStateMachine):
    """Two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ids = 0
        self.tenants: dict[str, Tenant] = {}
        self.ghosts: list[tuple[str, int, int]] = []  # memory of leases that are over: device, process, MiB
        self.late: list[dict[str, Reading]] = []
        self.ledger = Ledger(DEVICES, RULES)
        self.settled = True

    # ---- the world ------------------------------------------------------------------------------------------------

    def free(self, device: str) -> int:
        used = sum(tenant.allocated.get(device, 0) for tenant in self.tenants.values())
        return TOTAL - used - sum(mib for where, _, mib in self.ghosts if where == device)

    def promised(self, device: str) -> int:
        return sum(
            max(0, item.size_mib - tenant.allocated[device])
            for tenant in self.tenants.values()
            if (item := tenant.lease.on(device)) is not None
        )

    def sight(self, device: str, mark: int) -> Reading:
        used: dict[int, int] = {}
        for tenant in self.tenants.values():
            if tenant.allocated.get(device):
                used[tenant.lease.pid] = used.get(tenant.lease.pid, 0) + tenant.allocated[device]
        for where, pid, mib in self.ghosts:
            if where == device:
                used[pid] = used.get(pid, 0) + mib
        return Reading(mark, self.now, TOTAL, self.free(device), used)

    def look(self) -> None:
        mark = self.ledger.mark()
        self.ledger.read({device: self.sight(device, mark) for device in DEVICES})

    def bury(self) -> None:
        """Let what the ledger ended be over for its tenants too: their memory stays until they free it."""
        for ended in self.ledger.take_ended():
            tenant = self.tenants.pop(ended.lease.lease_id)
            self.ghosts += [(device, tenant.lease.pid, mib) for device, mib in tenant.allocated.items() if mib]

    # ---- what happens ---------------------------------------------------------------------------------------------

    @rule(
        sizes=st.dictionaries(st.sampled_from(sorted(DEVICES)), SIZES, min_size=1),
        tier=st.sampled_from(Tier),
        least=st.booleans(),
        reports=st.booleans(),
        anywhere=st.booleans(),
    )
    def lease(self, sizes: dict[str, int], tier: Tier, least: bool, reports: bool, anywhere: bool) -> None:
        self.ids += 1
        wanted = tuple(
            Wanted("" if anywhere else device, mib, 1 if least else mib) for device, mib in sorted(sizes.items())
        )
        ask = Ask("t", wanted, tier, 10, pid=0 if reports else self.ids)
        before = {device: self.free(device) - self.promised(device) for device in DEVICES}
        result = self.ledger.lease(ask, str(self.ids), self.ledger.arrive(), self.now, {})
        self.bury()
        if isinstance(result, Denied):
            assert str(self.ids) not in self.ledger.leases
            return
        assert len({item.device for item in result.items}) == len(wanted)
        self.tenants[result.lease_id] = Tenant(result, reports=reports)
        for item in result.items:
            rest = before[item.device] - item.size_mib - RULES.reserved_mib.get(item.device, 0)
            assert rest >= floor_for(tier, RULES.keep_free_mib), "granted below the floor of its tier"

    @rule(share=st.integers(1, 4), data=st.data())
    @precondition(lambda self: self.tenants)
    def allocate(self, share: int, data: st.DataObject) -> None:
        tenant = self.tenants[data.draw(st.sampled_from(sorted(self.tenants)))]
        for item in tenant.lease.items:
            left = item.size_mib - tenant.allocated[item.device]
            tenant.allocated[item.device] += max(0, left) * share // 4

    @rule(data=st.data(), seconds=st.integers(1, 20) | st.none())
    @precondition(lambda self: self.tenants)
    def renew(self, data: st.DataObject, seconds: int | None) -> None:
        """Report what is allocated, at least by those who report: they also do so before they free anything."""
        lease_id = data.draw(st.sampled_from(sorted(self.tenants)))
        tenant = self.tenants[lease_id]
        self.ledger.expire(self.now)
        self.bury()
        if lease_id not in self.tenants:
            return
        reports = tuple(Report(device, mib) for device, mib in tenant.allocated.items()) if tenant.reports else ()
        tenant.lease = self.ledger.renew(lease_id, Renewal(reports, seconds), self.now)
        assert tenant.lease.ends_at == self.now + tenant.lease.ttl_s

    @rule(data=st.data())
    @precondition(lambda self: any(tenant.reports for tenant in self.tenants.values()))
    def shrink(self, data: st.DataObject) -> None:
        names = sorted(name for name, tenant in self.tenants.items() if tenant.reports)
        lease_id = data.draw(st.sampled_from(names))
        tenant = self.tenants[lease_id]
        self.ledger.expire(self.now)
        self.bury()
        if lease_id not in self.tenants:
            return
        smaller = tuple(
            Report(item.device, min(tenant.allocated[item.device], item.size_mib), max(1, item.size_mib // 2))
            for item in tenant.lease.items
        )
        tenant.lease = self.ledger.renew(lease_id, Renewal(smaller), self.now)
        for item in tenant.lease.items:  # what it had above its new size, it frees when it comes to it
            surplus = tenant.allocated[item.device] - item.size_mib
            if surplus > 0:
                tenant.allocated[item.device] -= surplus
                self.ghosts.append((item.device, tenant.lease.pid, surplus))

    @rule(data=st.data(), end=st.sampled_from([End.DONE, End.CRASHED]), frees=st.booleans())
    @precondition(lambda self: self.tenants)
    def release(self, data: st.DataObject, end: End, frees: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.tenants)))
        if frees:
            self.tenants[lease_id].allocated = dict.fromkeys(self.tenants[lease_id].allocated, 0)
        self.ledger.release(lease_id, end, self.now)
        self.bury()
        assert lease_id not in self.ledger.leases
        assert lease_id not in self.tenants

    @rule()
    @precondition(lambda self: self.ghosts)
    def free_what_is_left(self) -> None:
        self.ghosts.pop(0)

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    # ---- the driver -----------------------------------------------------------------------------------------------

    @rule()
    def the_driver_answers(self) -> None:
        self.look()

    @rule()
    def the_driver_is_asked(self) -> None:
        mark = self.ledger.mark()
        self.late.append({device: self.sight(device, mark) for device in DEVICES})

    @rule(newest=st.booleans())
    @precondition(lambda self: self.late)
    def the_driver_answers_late(self, newest: bool) -> None:
        self.ledger.read(self.late.pop(-1 if newest else 0))

    @rule(device=st.sampled_from(sorted(DEVICES)))
    def the_driver_fails(self, device: str) -> None:
        self.ledger.read({device: Failure("it fails", self.now + 1)})
        ask = Ask("t", (Wanted(device, 1, 1),), Tier.PAID, 10)
        result = self.ledger.lease(ask, "nobody", self.ledger.arrive(), self.now, {})
        self.bury()
        assert isinstance(result, Denied), "granted although nobody knows what is free"

    # ---- the broker -----------------------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        before = dict(self.ledger.leases)
        past = Past(tuple(sorted(before.values(), key=lambda each: each.granted_at)), self.ledger.counts)
        self.ledger = Ledger(DEVICES, RULES, past)
        self.late.clear()
        assert self.ledger.leases == before

    # ---- what holds -----------------------------------------------------------------------------------------------

    @invariant()
    def what_is_promised_is_there(self) -> None:
        for device in DEVICES:
            assert self.promised(device) + RULES.reserved_mib.get(device, 0) <= self.free(device)

    @invariant()
    def every_lease_is_known_to_both(self) -> None:
        assert set(self.ledger.leases) == set(self.tenants)

    @invariant()
    def the_account_is_the_sum_of_its_leases(self) -> None:
        for device, account in self.ledger.accounts.items():
            held = [found for lease in account.leases() if (found := account.held(lease)) is not None]
            assert account.granted_mib == sum(each.size_mib for each in held)
            assert account.promised_mib == sum(max(0, each.size_mib - each.materialised_mib) for each in held)
            assert {lease.lease_id for lease in account.leases()} == {
                name for name, lease in self.ledger.leases.items() if lease.on(device) is not None
            }


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=amount(40, thorough=80), stateful_step_count=40, deadline=None)


def test_a_lease_that_is_not_renewed_ends_at_the_first_call_after_its_time_and_not_before():
    ledger = Ledger(DEVICES, RULES)
    ledger.read({device: Reading(ledger.mark(), 0.0, TOTAL, TOTAL) for device in DEVICES})
    ask = Ask("t", (Wanted("gpu0", 80, 80),), Tier.FREE, 10)
    first = ledger.lease(ask, "a", ledger.arrive(), 0.0, {})
    assert isinstance(first, Lease)
    assert first.items == (Item("gpu0", 80),)
    assert isinstance(ledger.lease(ask, "b", ledger.arrive(), 9.999, {}), Denied)
    ledger.expire(10.0)
    ledger.read({"gpu0": Reading(ledger.mark(), 10.0, TOTAL, TOTAL)})
    assert isinstance(ledger.lease(ask, "c", ledger.arrive(), 10.0, {}), Lease)
