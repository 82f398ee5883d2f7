"""The scheduler against a reference that is slow and obvious: after every step both must agree on who holds and who waits."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.admission.core.model import (
    ALL_MODALITIES,
    Ask,
    Event,
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
from services.admission.core.snapshot import free_slots, pressure, view
from tests.fixtures.amounts import amount

SLOTS = 4
MAX_QUEUE = 7
MODALITIES = (Modality.LLM, Modality.IMAGE)


@dataclass
class Waiter:
    """One ask as the reference sees it."""

    ticket: int
    ask: Ask
    arrival: int
    asked_at: float
    parked: bool = False

    def tier(self, now: float, ageing_s: float | None) -> Tier:
        if ageing_s is None or self.ask.tier is Tier.BACKGROUND:
            return self.ask.tier
        lifts = 0
        while self.asked_at + (lifts + 1) * ageing_s <= now:
            lifts += 1
        return Tier(min(Tier.PAID, self.ask.tier + lifts))


@dataclass
class Reference:
    """DESIGN's rules, word by word, with a sort and a scan at every step."""

    ageing_s: float | None
    now: float = 0.0
    held: dict[int, Ask] = field(default_factory=dict)
    waiting: dict[int, Waiter] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    asked_to_yield: set[int] = field(default_factory=set)
    arrivals: int = 0

    def in_use(self) -> int:
        return sum(ask.units for ask in self.held.values())

    def line(self) -> list[Waiter]:
        closed = {modality for hold in self.holds.values() for modality in hold.modalities}
        line = [each for each in self.waiting.values() if not each.parked and each.ask.modality not in closed]
        return sorted(line, key=lambda each: (-each.tier(self.now, self.ageing_s), each.arrival))

    def fits(self, ask: Ask) -> bool:
        if ask.tier is Tier.BACKGROUND:
            better = any(each.ask.tier > Tier.BACKGROUND for each in self.waiting.values())
            return self.in_use() == 0 and not better and ask.units <= SLOTS
        return self.in_use() + ask.units <= SLOTS

    def hand_over(self) -> tuple[list[int], list[int]]:
        """Grant from the head as long as it fits; return who was granted and who was asked to yield."""
        granted: list[int] = []
        while (line := self.line()) and self.fits(line[0].ask):
            head = line[0]
            del self.waiting[head.ticket]
            self.held[head.ticket] = head.ask
            granted.append(head.ticket)
        yielding: list[int] = []
        if line and line[0].ask.tier > Tier.BACKGROUND:
            background = {ticket for ticket, ask in self.held.items() if ask.tier is Tier.BACKGROUND and ask.units}
            yielding = sorted(background - self.asked_to_yield)
            self.asked_to_yield |= background
        return granted, yielding

    def in_flight(self, hold: Hold) -> int:
        return sum(a.modality in hold.modalities and t not in hold.excluded for t, a in self.held.items())


class SchedulerMachine(RuleBasedStateMachine):
    """Every operation of the scheduler in any order."""

    ageing_s: float | None = None

    def __init__(self) -> None:
        super().__init__()
        rules = Rules(max_queue=MAX_QUEUE, ageing_s=self.ageing_s)
        self.scheduler = Scheduler([PoolSpec("gpu0", SLOTS)], rules)
        self.reference = Reference(self.ageing_s)
        self.tickets = 0
        self.over: set[int] = set()

    @initialize(start=st.integers(0, 10**6))
    def begin(self, start: int) -> None:
        self.reference.now = float(start)

    # ---- steps ----------------------------------------------------------------------------------------------------

    @rule(
        tier=st.sampled_from(Tier),
        modality=st.sampled_from(MODALITIES),
        units=st.sampled_from([0, 1, 1, 1, 2, 2, SLOTS]),
        wait_s=st.sampled_from([0.0, 0.5, 3.0, 100.0, 100.0, 100.0]),
        may_wait=st.sampled_from([True, True, True, True, True, False]),
    )
    def ask(self, tier: Tier, modality: Modality, units: int, wait_s: float, may_wait: bool) -> None:
        ask = Ask("gpu0", modality, tier, units, wait_s, may_wait=may_wait)
        self.tickets += 1
        ticket = self.tickets
        events = self.scheduler.ask(ticket, ask, self.reference.now)
        reference = self.reference
        somebody_in_line = any(not each.parked for each in reference.waiting.values())
        length = len(reference.waiting)
        reference.arrivals += 1
        reference.waiting[ticket] = Waiter(ticket, ask, reference.arrivals, reference.now)
        closed = {modality for hold in reference.holds.values() for modality in hold.modalities}
        granted: list[int] = []
        yielding: list[int] = []
        if units == 0 and modality not in closed:
            reference.held[ticket] = reference.waiting.pop(ticket).ask
            granted = [ticket]
        elif not may_wait and somebody_in_line:
            pass
        else:
            granted, yielding = reference.hand_over()
        assert granted in ([], [ticket]), "a new ask grants nothing but itself"
        mine = [event for event in events if not isinstance(event, YieldRequested)]
        assert len(mine) == 1
        match mine[0]:
            case Granted():
                assert granted == [ticket]
                self.yields(events, yielding)
            case Queued(position=position):
                assert not granted
                assert may_wait
                assert wait_s > 0
                assert length < MAX_QUEUE
                line = [each for each in reference.waiting.values() if not each.parked]
                better = [each for each in line if each.tier(reference.now, self.ageing_s) >= tier]
                assert position == len(better)
                self.yields(events, yielding)
            case Rejected(refusal=refusal):
                assert not granted
                del reference.waiting[ticket]
                reference.asked_to_yield -= set(yielding)
                self.over.add(ticket)
                expected = (
                    Refusal.SATURATED
                    if not may_wait
                    else Refusal.ADMISSION_TIMEOUT
                    if wait_s == 0
                    else Refusal.QUEUE_FULL
                )
                assert refusal is expected
                assert expected is not Refusal.QUEUE_FULL or length >= MAX_QUEUE
            case other:
                raise AssertionError(other)

    @precondition(lambda self: self.reference.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.reference.held)))
        self.leave(ticket)

    @precondition(lambda self: self.reference.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.reference.waiting)))
        self.leave(ticket)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.over)))
        for call in (self.scheduler.release, self.scheduler.ready):
            assert call(ticket, self.now) == []
        assert self.scheduler.park([ticket], self.now) == []

    @precondition(lambda self: any(not each.parked for each in self.reference.waiting.values()))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        line = [ticket for ticket, each in self.reference.waiting.items() if not each.parked]
        tickets = data.draw(st.lists(st.sampled_from(line), min_size=1, max_size=3, unique=True))
        events = self.scheduler.park(tickets, self.now)
        for ticket in tickets:
            self.reference.waiting[ticket].parked = True
        self.agree(events, [])

    @precondition(lambda self: any(each.parked for each in self.reference.waiting.values()))
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        parked = [ticket for ticket, each in self.reference.waiting.items() if each.parked]
        ticket = data.draw(st.sampled_from(parked))
        events = self.scheduler.ready(ticket, self.now)
        self.reference.waiting[ticket].parked = False
        self.agree(events, [])

    @rule(data=st.data())
    def move_that_the_state_does_not_know(self, data: st.DataObject) -> None:
        held = sorted(self.reference.held)
        parked = [ticket for ticket, each in self.reference.waiting.items() if each.parked]
        line = [ticket for ticket, each in self.reference.waiting.items() if not each.parked]
        assert self.scheduler.park(held + parked, self.now) == []
        if held + line:
            assert self.scheduler.ready(data.draw(st.sampled_from(held + line)), self.now) == []

    @rule(seconds=st.sampled_from([0.00390625, 0.5, 1.0, 3.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        reference = self.reference
        reference.now += seconds
        events = self.scheduler.advance(reference.now)
        expired = [
            each.ticket for each in reference.waiting.values() if each.asked_at + each.ask.wait_s <= reference.now
        ]
        for ticket in expired:
            del reference.waiting[ticket]
            self.over.add(ticket)
        reference.holds = {key: hold for key, hold in reference.holds.items() if hold.until > reference.now}
        self.agree(events, expired)

    @rule(
        name=st.sampled_from("ab"),
        modalities=st.one_of(st.just(ALL_MODALITIES), st.sets(st.sampled_from(MODALITIES), min_size=1)),
        seconds=st.sampled_from([0.5, 1.0, 4.0]),
        data=st.data(),
    )
    def hold(self, name: str, modalities: set[Modality], seconds: float, data: st.DataObject) -> None:
        own = (
            data.draw(st.sets(st.sampled_from(sorted(self.reference.held)), max_size=2))
            if self.reference.held
            else set()
        )
        until = self.reference.now + seconds
        hold = Hold(name, frozenset({"gpu0"}), frozenset(modalities), until, "test", frozenset(own))
        events = self.scheduler.hold(hold, self.reference.now)
        self.reference.holds[name] = hold
        self.agree(events, [])

    @rule(name=st.sampled_from("ab"))
    def release_hold(self, name: str) -> None:
        events = self.scheduler.release_hold(name, self.reference.now)
        self.reference.holds.pop(name, None)
        self.agree(events, [])

    # ---- what must hold after each step ---------------------------------------------------------------------------

    @invariant()
    def in_use_never_exceeds_the_slots(self) -> None:
        pool = view(self.scheduler, self.reference.now)[0]
        assert pool.in_use == self.reference.in_use() <= SLOTS
        assert pool.permits == len(self.reference.held)
        assert free_slots(self.scheduler) == {"gpu0": SLOTS - pool.in_use}

    @invariant()
    def the_same_asks_hold_and_wait(self) -> None:
        holding = {ticket for ticket in range(self.tickets + 1) if self.scheduler.is_holding(ticket)}
        assert holding == set(self.reference.held)
        assert view(self.scheduler, self.reference.now)[0].waiting == len(self.reference.waiting)

    @invariant()
    def holds_know_what_is_in_flight(self) -> None:
        for name, hold in self.reference.holds.items():
            assert self.scheduler.holds[name] == hold
            assert self.scheduler.in_flight(hold) == self.reference.in_flight(hold)

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        for each in self.reference.waiting.values():
            assert each.asked_at + each.ask.wait_s > self.reference.now
        due = self.scheduler.next_due()
        ends = [each.asked_at + each.ask.wait_s for each in self.reference.waiting.values()]
        ends += [hold.until for hold in self.reference.holds.values()]
        assert not ends or (due is not None and due <= min(ends))

    @invariant()
    def the_line_is_ordered_by_tier_then_arrival(self) -> None:
        reference = self.reference
        line = [each for each in reference.waiting.values() if not each.parked]
        line.sort(key=lambda each: (-each.tier(reference.now, self.ageing_s), each.arrival))
        walked = [entry.ticket for entry in self.scheduler.pools["gpu0"].line.in_order()]
        assert walked == [each.ticket for each in line]

    @invariant()
    def nobody_who_fits_at_the_head_is_left_waiting(self) -> None:
        line = self.reference.line()
        assert not line or not self.reference.fits(line[0].ask)

    @invariant()
    def pressure_counts_every_waiter_at_the_tier_asked_for(self) -> None:
        seen = {(one.tier, one.modality): (one.depth, one.worst_wait_s) for one in pressure(self.scheduler, self.now)}
        expected: dict[tuple[Tier, Modality], tuple[int, float]] = {}
        for each in self.reference.waiting.values():
            key = (each.ask.tier, each.ask.modality)
            depth, worst = expected.get(key, (0, 0.0))
            expected[key] = (depth + 1, max(worst, self.now - each.asked_at))
        assert seen == expected

    # ---- helpers --------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.reference.now

    def leave(self, ticket: int) -> None:
        events = self.scheduler.release(ticket, self.reference.now)
        self.reference.held.pop(ticket, None)
        self.reference.waiting.pop(ticket, None)
        self.reference.asked_to_yield.discard(ticket)
        self.over.add(ticket)
        self.agree(events, [])

    def agree(self, events: list[Event], expired: list[int]) -> None:
        """The events are exactly the grants that became possible, the expiries and the yields."""
        reference = self.reference
        asked_at = {ticket: each.asked_at for ticket, each in reference.waiting.items()}
        granted, yielding = reference.hand_over()
        grants = [event for event in events if isinstance(event, Granted)]
        assert [event.ticket for event in grants] == granted
        assert all(event.waited_s == self.now - asked_at[event.ticket] for event in grants)
        rejected = {event.ticket: event.refusal for event in events if isinstance(event, Rejected)}
        assert rejected == dict.fromkeys(expired, Refusal.ADMISSION_TIMEOUT)
        self.yields(events, yielding)

    def yields(self, events: list[Event], yielding: list[int]) -> None:
        assert sorted(event.ticket for event in events if isinstance(event, YieldRequested)) == yielding


class AgeingMachine(SchedulerMachine):
    """The same with ageing on."""

    ageing_s = 1.0


TestStrictTiers = SchedulerMachine.TestCase
TestStrictTiers.settings = settings(max_examples=amount(50, thorough=150), stateful_step_count=80, deadline=None)
TestAgeing = AgeingMachine.TestCase
TestAgeing.settings = settings(max_examples=amount(50, thorough=150), stateful_step_count=80, deadline=None)
