"""Who is in memory when somebody else says how much there is."""

import itertools

import pytest

from services.kit.hosts.core.residency import Ask, Load, Residency, Unload
from services.kit.hosts.core.seats import Phase, Policy, Waiter, Why

A, B, C = 1, 2, 3
RECHECK_S = 1.0


class Lender:
    """A residency without a budget of its own, and who lends it memory: `total_mib`, less what `others_mib` hold."""

    def __init__(self, total_mib: int, **needs: int) -> None:
        self.now = 100.0
        self.total_mib, self.others_mib = total_mib, 0
        self.residency = Residency(Policy(None))
        self.leased: dict[int, int] = {}
        self.loads: list[int] = []
        self.refusals = 0
        self.tickets = itertools.count(1)
        for key, need in zip((A, B, C), needs.values(), strict=False):
            self.residency.add(key, need_mib=need, pinned=False, ttl_s=0)

    def want(self, key: int) -> int:
        ticket = next(self.tickets)
        self.residency.want(key, ticket, Waiter(1, self.now))
        return ticket

    def settle(self) -> float | None:
        while True:
            decision = self.residency.decide(self.now)
            for action in decision.actions:
                self.carry_out(action)
            if not decision.actions:
                return decision.again_s

    def carry_out(self, action: object) -> None:
        match action:
            case Ask(key=key):
                for more in self.residency.commit(key, self.now)[1]:
                    self.carry_out(more)
            case Load(key=key):
                self.load(key)
            case Unload(key=key):
                del self.leased[key]
                self.residency.gone(key, self.now)

    def load(self, key: int) -> None:
        need = self.residency.seat(key).need_mib
        room = self.total_mib - self.others_mib - sum(self.leased.values())
        if need > room:
            self.refusals += 1
            self.residency.capped(key, room, self.now + RECHECK_S)
            self.residency.gone(key, self.now)
            return
        self.leased[key] = need
        self.loads.append(key)
        self.residency.loaded(key, self.now)

    def use(self, key: int, ticket: int) -> None:
        self.residency.leave(key, ticket)
        self.residency.begin(key)

    def after(self, seconds: float) -> None:
        self.now += seconds


def test_a_refusal_makes_an_idle_model_leave_and_the_wanted_one_is_loaded() -> None:
    lender = Lender(100, a=80, b=80)
    ticket = lender.want(A)
    lender.settle()
    lender.use(A, ticket)
    lender.residency.end(A, lender.now)
    lender.after(1)
    lender.want(B)
    lender.settle()
    assert (lender.loads, lender.refusals) == ([A, B], 1)
    assert lender.residency.seat(A).why is Why.EVICTED
    assert lender.residency.seat(B).displaced == (), "it is loaded: nothing is to be restored"


def test_a_model_at_work_keeps_its_turn_and_never_opens_again_while_it_makes_room() -> None:
    lender = Lender(100, a=80, b=80)
    ticket = lender.want(A)
    lender.settle()
    lender.use(A, ticket)
    lender.want(B)
    lender.settle()
    assert lender.residency.usable(A), "its turn is not over"
    lender.after(3)
    lender.settle()
    assert not lender.residency.usable(A)
    refusals = lender.refusals
    for _ in range(20):  # long after the refusal has become old
        lender.after(1)
        lender.settle()
        assert not lender.residency.usable(A)
    assert lender.refusals == refusals, "nobody is asked again while room is being made"
    lender.residency.end(A, lender.now)
    lender.settle()
    assert lender.loads == [A, B]


def test_room_that_others_hold_is_asked_for_again_after_a_moment() -> None:
    lender = Lender(100, a=80)
    lender.others_mib = 50
    lender.want(A)
    assert lender.settle() == pytest.approx(lender.now + RECHECK_S)
    lender.after(RECHECK_S)
    lender.settle()
    assert (lender.refusals, lender.loads) == (2, [])
    lender.others_mib = 0
    lender.after(RECHECK_S)
    lender.settle()
    assert lender.loads == [A]


def test_a_model_that_fits_beside_the_others_is_loaded_while_a_larger_one_has_to_wait_for_strangers() -> None:
    lender = Lender(100, a=90, b=30)
    lender.others_mib = 50
    lender.want(A)
    lender.settle()
    lender.residency.leave(A, 1)
    lender.want(B)
    lender.settle()
    assert lender.loads == [B]


def test_nobody_is_driven_out_for_room_that_would_not_be_enough() -> None:
    lender = Lender(100, a=30, b=90)
    lender.others_mib = 40
    ticket = lender.want(A)
    lender.settle()
    lender.use(A, ticket)
    lender.residency.end(A, lender.now)
    lender.after(10)
    lender.want(B)
    lender.settle()
    assert lender.residency.usable(A)
    assert lender.loads == [A]


def test_a_load_waits_for_memory_only_when_nobody_here_can_make_room_or_somebody_just_did() -> None:
    lender = Lender(200, a=80, b=80)
    assert lender.residency.should_wait(A, lender.now, 2.0)
    lender.want(B)
    lender.settle()
    assert not lender.residency.should_wait(A, lender.now, 2.0)
    for action in lender.residency.dismiss(B):
        lender.carry_out(action)
    lender.residency.add(C, need_mib=1, pinned=False, ttl_s=0)
    lender.want(C)
    lender.settle()
    assert lender.residency.should_wait(A, lender.now + 1, 2.0)
    assert not lender.residency.should_wait(A, lender.now + 3, 2.0)


def test_an_idle_model_gives_its_memory_to_another_process_and_one_that_is_wanted_does_not() -> None:
    lender = Lender(100, a=80)
    ticket = lender.want(A)
    lender.settle()
    assert lender.residency.give(A) == [], "somebody waits for it"
    lender.use(A, ticket)
    assert lender.residency.give(A) == [], "somebody uses it"
    lender.residency.end(A, lender.now)
    assert lender.residency.give(A) == [Unload(A)]
    assert lender.residency.seat(A).why is Why.RECLAIMED


def test_a_model_whose_lease_is_lost_leaves_after_its_last_request_and_is_loaded_anew() -> None:
    lender = Lender(100, a=80)
    first = lender.want(A)
    lender.settle()
    lender.use(A, first)
    lender.residency.lose(A)
    lender.want(A)
    lender.settle()
    assert not lender.residency.usable(A)
    assert lender.residency.seat(A).phase is Phase.RESIDENT
    lender.residency.end(A, lender.now)
    lender.settle()
    assert lender.loads == [A, A]
    assert lender.residency.usable(A)


def test_a_load_that_fails_tells_who_left_for_it_once() -> None:
    lender = Lender(100, a=80, b=80)
    ticket = lender.want(A)
    lender.settle()
    lender.use(A, ticket)
    lender.residency.end(A, lender.now)
    lender.after(5)
    lender.want(B)
    lender.refusals = 0
    decision = lender.residency.decide(lender.now)
    while not any(isinstance(action, Unload) for action in decision.actions):
        for action in decision.actions:
            if isinstance(action, Ask):
                _, more = lender.residency.commit(B, lender.now)
                for one in more:
                    lender.carry_out(one)
            else:
                lender.carry_out(action)
        if lender.residency.seat(A).phase is Phase.ABSENT:
            break
        decision = lender.residency.decide(lender.now)
    assert lender.residency.take_displaced(B) == (A,)
    assert lender.residency.take_displaced(B) == ()


def test_a_model_is_charged_otherwise_only_from_its_next_load_on() -> None:
    lender = Lender(100, a=80)
    lender.residency.resize(A, 60)
    lender.want(A)
    lender.settle()
    lender.residency.resize(A, 70)
    assert lender.residency.charged_mib == 60
