"""Who is in memory: scenarios, and every order of events that hypothesis can think of."""

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from services.kit.hosts.core.residency import Ask, Load, Refuse, Residency, Unload, Withdraw
from services.kit.hosts.core.seats import IllegalChangeError, Phase, Policy, Waiter
from tests.fixtures.amounts import amount

A, B, C = 1, 2, 3
FREE, PAID = 1, 3


class Table:
    """A residency whose effects happen at once: leave is given, loads succeed, hosts end."""

    def __init__(self, budget_mib: int | None, *, turn_s: float = 3.0, **needs: int) -> None:
        self.now = 100.0
        self.residency = Residency(Policy(budget_mib, turn_s=turn_s))
        self.tickets = itertools.count(1)
        self.loads: list[int] = []
        self.unloads: list[int] = []
        self.refused: list[int] = []
        for key, need in zip((A, B, C), needs.values(), strict=False):
            self.residency.add(key, need_mib=need, pinned=False, ttl_s=0)

    def want(self, key: int, rank: int = FREE) -> int:
        ticket = next(self.tickets)
        self.residency.want(key, ticket, Waiter(rank, self.now))
        return ticket

    def settle(self) -> float | None:
        while True:
            decision = self.residency.decide(self.now)
            if not decision.actions:
                return decision.again_s
            for action in decision.actions:
                self.carry_out(action)

    def carry_out(self, action: object) -> None:
        match action:
            case Ask(key=key):
                for more in self.residency.commit(key, self.now)[1]:
                    self.carry_out(more)
            case Load(key=key):
                self.loads.append(key)
                self.residency.loaded(key, self.now)
            case Unload(key=key):
                self.unloads.append(key)
                self.residency.gone(key, self.now)
            case Refuse(key=key):
                self.refused.append(key)
                self.residency.seat(key).waiters.clear()
            case Withdraw():
                pass

    def use(self, key: int, ticket: int) -> None:
        self.residency.leave(key, ticket)
        self.residency.begin(key)

    def after(self, seconds: float) -> None:
        self.now += seconds


def test_a_wanted_model_is_loaded_and_charged() -> None:
    table = Table(100, a=60)
    ticket = table.want(A)
    table.settle()
    assert table.loads == [A]
    assert table.residency.charged_mib == 60
    assert table.residency.usable(A)
    table.use(A, ticket)
    assert table.settle() is None


def test_what_fits_beside_the_others_drives_nobody_out() -> None:
    table = Table(100, a=60, b=40)
    table.want(A)
    table.want(B)
    table.settle()
    assert (table.loads, table.unloads) == ([A, B], [])


def test_the_least_recently_used_idle_model_makes_room() -> None:
    table = Table(100, a=50, b=50, c=50)
    for key in (A, B):
        ticket = table.want(key)
        table.settle()
        table.use(key, ticket)
        table.after(1)
    table.residency.end(B, table.now)
    table.after(1)
    table.residency.end(A, table.now)
    table.after(10)
    table.want(C)
    table.settle()
    assert table.unloads == [B]
    assert table.loads[-1] == C


def test_an_active_model_is_never_unloaded_and_takes_no_more_once_its_turn_is_over() -> None:
    table = Table(100, a=80, b=80)
    ticket = table.want(A)
    table.settle()
    table.use(A, ticket)
    table.after(1)
    table.want(B)
    again = table.settle()
    assert table.residency.usable(A), "its turn is not over"
    assert again == pytest.approx(103.0)
    table.after(2)
    table.settle()
    assert not table.residency.usable(A)
    assert table.unloads == []
    table.residency.end(A, table.now)
    table.settle()
    assert (table.loads, table.unloads) == ([A, B], [A])


def test_a_model_whose_room_would_not_be_enough_stays_open_while_a_larger_one_drains() -> None:
    table = Table(200, a=117, b=117, c=42)
    ticket = table.want(A)
    table.settle()
    table.use(A, ticket)
    small = table.want(C)
    table.settle()
    table.use(C, small)
    table.residency.end(C, table.now)
    table.after(10)
    table.want(B)
    table.settle()
    assert not table.residency.usable(A)
    assert table.residency.usable(C), "a alone makes enough room"
    table.residency.end(A, table.now)
    table.settle()
    assert (table.loads, table.unloads) == ([A, C, B], [A])


def test_a_model_opens_again_when_nobody_waits_for_its_room_any_more() -> None:
    table = Table(100, a=80, b=80)
    ticket = table.want(A)
    table.settle()
    table.use(A, ticket)
    table.after(5)
    waiting = table.want(B)
    table.settle()
    assert not table.residency.usable(A)
    table.residency.leave(B, waiting)
    table.settle()
    assert table.residency.usable(A)


def test_requests_for_the_loaded_model_are_grouped_for_a_turn_and_no_longer() -> None:
    table = Table(100, a=80, b=80)
    first = table.want(A)
    table.settle()
    table.want(B)
    served = 0
    while table.residency.usable(A):
        table.use(A, first)
        table.after(0.1)
        table.residency.end(A, table.now)
        first = table.want(A)
        served += 1
        table.settle()
    assert 25 <= served <= 35
    assert (table.loads, table.unloads) == ([A, B], [A])


def test_a_turn_is_at_least_as_long_as_the_load_took() -> None:
    table = Table(100, a=80, b=80)
    table.want(A)
    (ask,) = table.residency.decide(table.now).actions
    assert table.residency.commit(ask.key, table.now) == (True, [])
    assert table.residency.decide(table.now).actions == (Load(A),)
    table.after(20)
    table.residency.loaded(A, table.now)
    table.want(B)
    table.after(19)
    assert table.settle() == pytest.approx(140.0)
    assert table.residency.usable(A)
    table.after(1)
    table.settle()
    assert table.unloads == [A]


def test_two_models_that_do_not_fit_alternate_at_the_pace_of_turns() -> None:
    table = Table(100, a=80, b=80)
    waiting = {key: [table.want(key) for _ in range(4)] for key in (A, B)}
    served = {A: 0, B: 0}
    for _ in range(400):
        table.settle()
        for key in (A, B):
            if table.residency.usable(key) and waiting[key]:
                ticket = waiting[key].pop(0)
                table.use(key, ticket)
                table.after(0.1)
                table.residency.end(key, table.now)
                waiting[key].append(table.want(key))
                served[key] += 1
        table.after(0.01)
    assert min(served.values()) > 100
    assert len(table.loads) < 20


def test_the_best_tier_is_loaded_first_then_who_waits_longest() -> None:
    table = Table(100, a=80, b=80, c=80)
    table.want(B)
    table.after(1)
    table.want(C)
    table.after(1)
    table.want(A, rank=PAID)
    table.settle()
    assert table.loads == [A]


def test_nobody_takes_the_room_that_a_better_one_waits_for() -> None:
    table = Table(100, a=60, b=80, c=40)
    ticket = table.want(A)
    table.settle()
    table.use(A, ticket)
    table.want(B)
    table.after(0.1)
    table.want(C)
    table.settle()
    assert table.loads == [A], "c would fit, but b came first"


def test_a_load_nobody_waits_for_goes_on_until_another_is_wanted() -> None:
    table = Table(100, a=80, b=80)
    residency = table.residency
    ticket = table.want(A)
    (ask,) = residency.decide(table.now).actions
    assert ask == Ask(A, FREE, operator=False)
    assert residency.commit(A, table.now) == (True, [])
    assert residency.decide(table.now).actions == (Load(A),)
    residency.leave(A, ticket)
    assert residency.decide(table.now).actions == ()
    table.want(B)
    assert residency.decide(table.now).actions == (Ask(B, FREE, operator=False),)
    assert residency.commit(B, table.now) == (True, [Unload(A)])
    assert residency.decide(table.now).actions == (), "charged until its process is gone"
    residency.gone(A, 0)
    assert residency.decide(table.now).actions == (Load(B),)


def test_leave_to_load_is_withdrawn_when_nobody_waits_and_asked_again_for_a_better_tier() -> None:
    table = Table(100, a=80)
    ticket = table.want(A)
    assert table.residency.decide(table.now).actions == (Ask(A, FREE, operator=False),)
    table.want(A, rank=PAID)
    assert table.residency.decide(table.now).actions == (Withdraw(A), Ask(A, PAID, operator=False))
    table.residency.leave(A, ticket)
    table.residency.seat(A).waiters.clear()
    assert table.residency.decide(table.now).actions == (Withdraw(A),)


def test_leave_that_comes_too_late_is_given_back() -> None:
    table = Table(100, a=80, b=80)
    first = table.want(A)
    table.settle()
    table.use(A, first)
    table.residency.end(A, table.now)
    table.after(0.5)
    table.want(B)
    assert table.residency.decide(table.now).actions == (Ask(B, FREE, operator=False),)
    table.residency.begin(A)  # its turn is not over: it may be used while leave is asked for
    assert table.residency.commit(B, table.now) == (False, [])
    assert table.residency.seat(A).phase is Phase.RESIDENT


def test_an_idle_model_is_unloaded_after_its_time_and_a_pinned_one_never() -> None:
    table = Table(None, a=10, b=10)
    table.residency.adjust(A, pinned=False, ttl_s=30)
    table.residency.adjust(B, pinned=True, ttl_s=30)
    for key in (A, B):
        ticket = table.want(key)
        table.settle()
        table.residency.leave(key, ticket)
    assert table.settle() == pytest.approx(130.0)
    table.after(30)
    table.settle()
    assert table.unloads == [A]


def test_a_model_that_can_never_fit_beside_pinned_ones_is_refused_with_the_numbers() -> None:
    table = Table(100, a=60, b=50)
    table.residency.adjust(A, pinned=True, ttl_s=0)
    table.want(A)
    table.settle()
    table.want(B)
    assert table.residency.decide(table.now).actions == (Refuse(B, 50, 40),)


def test_a_model_whose_load_failed_rests_before_it_is_tried_again() -> None:
    table = Table(100, a=60)
    table.want(A)
    table.residency.rest(A, table.now + 5)
    assert table.settle() == pytest.approx(105.0)
    assert table.loads == []
    table.after(5)
    table.settle()
    assert table.loads == [A]


def test_a_held_model_is_neither_used_nor_loaded() -> None:
    table = Table(100, a=60)
    table.want(A)
    table.residency.hold(A, held=True)
    table.settle()
    assert table.loads == []
    table.residency.hold(A, held=False)
    table.settle()
    assert table.residency.usable(A)
    table.residency.hold(A, held=True)
    assert not table.residency.usable(A)


def test_a_model_in_memory_cannot_be_forgotten() -> None:
    table = Table(100, a=60)
    table.want(A)
    table.settle()
    with pytest.raises(IllegalChangeError):
        table.residency.forget(A)


class Events(RuleBasedStateMachine):
    """Requests, loads that succeed or fail, hosts that end when they like, permits that take their time."""

    tickets = Bundle("tickets")
    uses = Bundle("uses")

    @initialize(
        needs=st.lists(st.integers(1, 60), min_size=2, max_size=5),
        pinned=st.sets(st.integers(0, 4), max_size=1),
        ttl=st.sampled_from([0, 2, 50]),
    )
    def begin(self, needs: list[int], pinned: set[int], ttl: float) -> None:
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.residency = Residency(Policy(100, turn_s=3.0, linger_s=0.2))
        self.needs = dict(enumerate(needs))
        self.keys = list(self.needs)
        for key, need in self.needs.items():
            self.residency.add(key, need_mib=need, pinned=key in pinned, ttl_s=ttl)
        self.asked: set[int] = set()
        self.loading: set[int] = set()
        self.hosts: set[int] = set()
        self.ending: set[int] = set()
        self.active = dict.fromkeys(self.keys, 0)
        self.waiting: dict[int, int] = {}

    def decide(self) -> None:
        self.do(self.residency.decide(self.now).actions)

    def do(self, actions) -> None:
        for action in actions:
            key = action.key
            match action:
                case Ask():
                    assert key not in self.asked
                    self.asked.add(key)
                case Withdraw():
                    self.asked.discard(key)
                case Load():
                    assert not self.asked & {key}
                    assert key not in self.hosts
                    self.hosts.add(key)
                    self.loading.add(key)
                case Unload():
                    assert self.active[key] == 0, "whoever is active stays"
                    assert not self.residency.seat(key).pinned
                    assert key in self.hosts
                    self.ending.add(key)
                    self.loading.discard(key)
                case Refuse(need_mib=need, most_mib=most):
                    assert need > most
                    for ticket in [t for t, k in self.waiting.items() if k == key]:
                        self.residency.leave(key, ticket)
                        del self.waiting[ticket]

    @rule(target=tickets, which=st.integers(0, 100), rank=st.integers(0, 3))
    def want(self, which: int, rank: int) -> tuple[int, int]:
        key, ticket = self.keys[which % len(self.keys)], next(self.numbers)
        self.residency.want(key, ticket, Waiter(rank, self.now))
        self.waiting[ticket] = key
        self.decide()
        return key, ticket

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: tuple[int, int]) -> None:
        self.waiting.pop(ticket[1], None)
        self.residency.leave(*ticket)
        self.decide()

    @rule(target=uses, ticket=consumes(tickets))
    def use(self, ticket: tuple[int, int]) -> int:
        key, number = ticket
        self.residency.leave(key, number)
        if self.waiting.pop(number, None) is None or not self.residency.usable(key):
            self.decide()
            return -1
        assert key in self.hosts - self.ending - self.loading
        self.residency.begin(key)
        self.active[key] += 1
        self.decide()
        return key

    @rule(key=consumes(uses))
    def end(self, key: int) -> None:
        if key >= 0:
            self.residency.end(key, self.now)
            self.active[key] -= 1
            self.decide()

    @precondition(lambda self: self.asked)
    @rule(refused=st.booleans())
    def answer_leave(self, refused: bool) -> None:
        key = min(self.asked)
        self.asked.discard(key)
        if refused:
            self.residency.refused_leave(key)
        else:
            self.do(self.residency.commit(key, self.now)[1])
        self.decide()

    @precondition(lambda self: self.loading)
    @rule(fails=st.booleans())
    def finish_load(self, fails: bool) -> None:
        key = min(self.loading)
        self.loading.discard(key)
        if fails:
            self.hosts.discard(key)
            self.residency.gone(key, self.now)
            self.residency.rest(key, self.now + 1)
        else:
            self.residency.loaded(key, self.now)
        self.decide()

    @precondition(lambda self: self.loading)
    @rule(room_mib=st.integers(0, 100))
    def memory_is_refused(self, room_mib: int) -> None:
        key = min(self.loading)
        self.loading.discard(key)
        self.hosts.discard(key)
        self.residency.capped(key, room_mib, self.now + 1)
        self.residency.gone(key, self.now)
        self.decide()

    @precondition(lambda self: self.ending)
    @rule()
    def host_ends(self) -> None:
        self.host_ends_of(min(self.ending))
        self.decide()

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.decide()

    @invariant()
    def memory_is_never_overcommitted(self) -> None:
        assert sum(self.needs[key] for key in getattr(self, "hosts", ())) <= 100

    @invariant()
    def charges_are_what_hosts_take(self) -> None:
        if hasattr(self, "hosts"):
            assert self.residency.charged_mib == sum(self.needs[key] for key in self.hosts)

    def teardown(self) -> None:
        """Whoever waits is served when running requests end, loads succeed, and time passes."""
        if not hasattr(self, "hosts"):
            return
        for key, count in self.active.items():
            for _ in range(count):
                self.residency.end(key, self.now)
            self.active[key] = 0
        for _ in range(400):
            if not self.waiting:
                return
            self.decide()
            self.everything_ends_well()
            self.now += 0.5
        raise AssertionError(f"still waiting: {self.waiting}")

    def everything_ends_well(self) -> None:
        for key in tuple(self.ending):
            self.host_ends_of(key)
        for key in tuple(self.loading):
            self.loading.discard(key)
            self.residency.loaded(key, self.now)
        for key in tuple(self.asked):
            self.asked.discard(key)
            self.do(self.residency.commit(key, self.now)[1])
        for ticket, key in tuple(self.waiting.items()):
            if self.residency.usable(key):
                self.residency.leave(key, ticket)
                del self.waiting[ticket]

    def host_ends_of(self, key: int) -> None:
        self.ending.discard(key)
        self.hosts.discard(key)
        self.residency.gone(key, self.now)


Events.TestCase.settings = settings(
    max_examples=amount(40, thorough=80),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_no_order_of_events_breaks_the_residency = Events.TestCase


def test_without_a_budget_everything_fits() -> None:
    table = Table(None, a=10**6, b=10**6, c=10**6)
    for key in (A, B, C):
        table.want(key)
    table.settle()
    assert sorted(table.loads) == [A, B, C]
    assert table.residency.charged_mib < math.inf
