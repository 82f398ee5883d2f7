"""One device: who holds its slots, who waits for them, and who is next.

Every method takes the time and returns the events to deliver. A release hands its slots straight to whoever now fits
and costs the same with ten waiters as with a hundred thousand: nothing here walks the line.
"""

from collections.abc import Iterable, Mapping

from services.admission.core.calendar import Calendar
from services.admission.core.counters import Census, Counters
from services.admission.core.drain_rate import LONGEST_S, DrainRate
from services.admission.core.entry import MOVES, Entry, Move, State
from services.admission.core.fair_share import FairShare
from services.admission.core.line import Line
from services.admission.core.model import (
    BEST_FIRST,
    Event,
    Granted,
    Modality,
    PoolSpec,
    Queued,
    Refusal,
    Rejected,
    Rules,
    Tier,
    YieldRequested,
)
from services.admission.core.refusals import RESTART_S, Scene, sentence

# Globals, since these are looked up several times for every permit, and an enum's member costs three times as much.
_BACKGROUND = Tier.BACKGROUND
_WAITING, _PARKED, _HOLDING, _GONE = State.WAITING, State.PARKED, State.HOLDING, State.GONE
_GRANT, _LEAVE = Move.GRANT, Move.LEAVE


class Pool:
    """The state of one device. `live` is the table of all asks by ticket, shared by the pools of a scheduler."""

    def __init__(self, spec: PoolSpec, rules: Rules, live: dict[int, Entry]) -> None:
        self.name = spec.name
        self.slots = spec.slots
        self.in_use = 0
        self.permits = 0
        self.waiting = 0
        self.parked = 0
        self.in_flight: dict[Modality, int] = dict.fromkeys(Modality, 0)
        self.counters = Counters()
        self.census = Census()
        self.line = Line()
        self.drain_rate = DrainRate()
        self._rules = rules
        self._live = live
        self._arrivals = 0
        self._better_waiting = 0
        self._slotless_waiting = 0
        self._deadlines = Calendar()
        self._lifts = Calendar()
        self._closed: Mapping[Modality, float] = {}
        self._not_asked_to_yield: dict[int, Entry] = {}
        self._fair = {tier: FairShare() for tier in BEST_FIRST} if rules.fair_share else None

    # ---- what callers do ------------------------------------------------------------------------------------------

    def ask(self, entry: Entry, now: float) -> list[Event]:
        """Grant, queue or refuse a new ask."""
        ask = entry.ask
        if self._is_at_once(entry):
            self._take(entry)
            return [Granted(entry.ticket, 0.0)]
        if refusal := self._refusal(entry):
            return [self._reject(entry, refusal, now)]
        self._arrivals += 1
        start = self._fair[ask.tier].arrived(ask.principal, ask.units) if self._fair else 0.0
        entry.key = (start, self._arrivals)
        self._enter(entry, now)
        # Exact in arrival order, the worst case with fair share.
        place = self.line.served_before(entry.tier)
        queued = Queued(entry.ticket, place, self.drain_rate.seconds_for(place, now))
        return [queued, *self._ask_to_yield(self.line.head(self._closed))] if self._not_asked_to_yield else [queued]

    def leave(self, entry: Entry, now: float) -> list[Event]:
        """Give a permit back, or withdraw an ask that waits."""
        if entry.state is _HOLDING:
            self._give_back(entry, now)
        else:
            self._exit(entry, now)
            self.counters.cancelled[entry.ask.tier] += 1
        self._move(entry, _LEAVE)
        return self._hand_over(now) if self.waiting else []

    def park(self, entries: Iterable[Entry], now: float) -> list[Event]:
        """Let asks step out of the line, all at once, and keep their places; nothing happens to one that does not wait.

        Place 0 tells a caller that this came before any grant.
        """
        events: list[Event] = []
        for entry in entries:
            if (entry.state, Move.PARK) in MOVES:
                self._move(entry, Move.PARK)
                self.line.remove(entry)
                self.parked += 1
                events.append(Queued(entry.ticket, 0, None))
        return events + self._hand_over(now) if events else []

    def ready(self, entry: Entry, now: float) -> list[Event]:
        """Step back into the line at the old place; nothing happens to an ask that is not parked."""
        if (entry.state, Move.READY) not in MOVES:
            return []
        self._move(entry, Move.READY)
        self.line.add(entry)
        self.parked -= 1
        entry.told = 0
        return self._hand_over(now)

    def adopt(self, entry: Entry, now: float) -> list[Event]:
        """Count a permit granted before a restart or a lost session.

        Its work runs already, so the slots are in use whether they were free or not: when somebody else got them in
        the meantime, the pool is over its slots and grants nothing until it is not.
        """
        self._take(entry)
        return self._hand_over(now) if self.waiting else []

    # ---- what time and the operator do ----------------------------------------------------------------------------

    def age(self, now: float) -> list[Event]:
        """End the waits whose deadline has come and lift who has aged; `serve` grants what that makes possible."""
        events: list[Event] = []
        for ticket in self._deadlines.pop_due(now):
            self._expire(self._live[ticket], now, events)
        while due := self._lifts.pop_due(now):
            for ticket in due:
                self._lift(self._live[ticket])
        return events

    def serve(self, now: float) -> list[Event]:
        """Grant what is possible."""
        return self._hand_over(now) if self.waiting else []

    def next_due(self) -> float | None:
        """Return when `advance` has something to do, or None."""
        times = [due for due in (self._deadlines.next_due(), self._lifts.next_due()) if due is not None]
        return min(times, default=None)

    def close(self, closed: Mapping[Modality, float], now: float) -> list[Event]:
        """Grant nothing of these modalities (each with the time it opens again); open all others."""
        self._closed = closed
        return self._hand_over(now) if self.waiting else []

    def refuse(self, entries: Iterable[Entry], refusal: Refusal, now: float) -> list[Event]:
        """End the waits of these asks; those that hold a permit keep it."""
        events: list[Event] = []
        for entry in entries:
            if entry.state is not _HOLDING:
                self._exit(entry, now)
                events.append(self._reject(entry, refusal, now))
        return events

    # ---- decisions ------------------------------------------------------------------------------------------------

    def _is_at_once(self, entry: Entry) -> bool:
        """Whether a new ask is granted without entering the line."""
        ask = entry.ask
        if ask.modality in self._closed or not self.slots:
            return False
        if not ask.units:
            return True
        if not self._fits(entry):
            return False
        if self.waiting == self.parked:
            return True
        # Somebody is in the line: `try` passes nobody, everyone else only whom they rank before.
        head = self.line.head(self._closed)
        return ask.may_wait and (head is None or head.tier < entry.tier)

    def _fits(self, entry: Entry) -> bool:
        if entry.ask.units > self.slots - self.in_use:
            return False
        return entry.tier > _BACKGROUND or not (self.in_use or self._better_waiting)

    def _refusal(self, entry: Entry) -> Refusal | None:
        """Why a new ask that is not granted at once may not wait either."""
        if not self.slots:
            return Refusal.NO_CAPACITY
        if not entry.ask.may_wait:
            return Refusal.SATURATED
        if entry.ask.wait_s <= 0:
            return Refusal.ADMISSION_TIMEOUT
        if self.waiting >= self._rules.max_queue:
            return Refusal.QUEUE_FULL
        return None

    def _hand_over(self, now: float) -> list[Event]:
        """Grant to the head of the line as long as it fits; then ask background holders to leave if somebody waits."""
        events: list[Event] = []
        # On a full pool nobody can be next but who takes no slots, so the line is not even looked at.
        while self.in_use < self.slots or self._slotless_waiting:
            head = self.line.head(self._closed)
            if head is None:
                break
            if head.deadline <= now:
                self._expire(head, now, events)
            elif self._fits(head):
                self._exit(head, now)
                self._take(head)
                events.append(Granted(head.ticket, now - head.asked_at))
            else:
                break
        if self._not_asked_to_yield:
            events += self._ask_to_yield(self.line.head(self._closed))
        return events

    def _ask_to_yield(self, head: Entry | None) -> list[Event]:
        """Ask background holders to leave, each once, when somebody better waits."""
        if head is None or head.tier is _BACKGROUND:
            return []
        events: list[Event] = [YieldRequested(ticket, head.tier) for ticket in self._not_asked_to_yield]
        self._not_asked_to_yield.clear()
        return events

    # ---- bookkeeping ----------------------------------------------------------------------------------------------

    def _move(self, entry: Entry, move: Move) -> None:
        entry.state = MOVES[entry.state, move]
        if entry.state is _GONE:
            del self._live[entry.ticket]

    def _enter(self, entry: Entry, now: float) -> None:
        """Enter a waiter everywhere: line, census, deadline, ageing."""
        if not self.waiting:
            self.drain_rate.busy(now)
        self.waiting += 1
        if self.waiting > self.counters.max_waiting:  # noqa: PLR1730 - a call of max() for every ask shows in the bench
            self.counters.max_waiting = self.waiting
        self.line.add(entry)
        self.census.enter(entry)
        self._deadlines.add(entry.ticket, entry.deadline)
        if not entry.ask.units:
            self._slotless_waiting += 1
        if entry.tier > _BACKGROUND:
            self._better_waiting += 1
            self._schedule_lift(entry, entry.asked_at)

    def _exit(self, entry: Entry, now: float) -> None:
        """Take a waiter out everywhere, for whatever reason."""
        self.waiting -= 1
        if entry.state is _PARKED:
            self.parked -= 1
        else:
            self.line.remove(entry)
        self.census.leave(entry)
        self._deadlines.remove(entry.ticket, entry.deadline)
        if not entry.ask.units:
            self._slotless_waiting -= 1
        if entry.tier > _BACKGROUND:
            self._better_waiting -= 1
            if entry.lift_at is not None:
                self._lifts.remove(entry.ticket, entry.lift_at)
        if not self.waiting:
            self.drain_rate.idle(now)

    def _take(self, entry: Entry) -> None:
        ask = entry.ask
        self._move(entry, _GRANT)
        self.in_use += ask.units
        self.permits += 1
        self.in_flight[ask.modality] += 1
        counters = self.counters
        counters.granted[ask.tier] += 1
        if self.in_use > counters.max_in_use:  # noqa: PLR1730 - as in _enter
            counters.max_in_use = self.in_use
        if ask.tier is _BACKGROUND and ask.units:
            self._not_asked_to_yield[entry.ticket] = entry
        if self._fair:
            self._fair[entry.tier].served(entry.key[0])

    def _give_back(self, entry: Entry, now: float) -> None:
        ask = entry.ask
        self.in_use -= ask.units
        self.permits -= 1
        self.in_flight[ask.modality] -= 1
        self.drain_rate.released(now)
        if ask.tier is _BACKGROUND:
            self._not_asked_to_yield.pop(entry.ticket, None)

    def _expire(self, entry: Entry, now: float, events: list[Event]) -> None:
        self._exit(entry, now)
        events.append(self._reject(entry, Refusal.ADMISSION_TIMEOUT, now))

    def _reject(self, entry: Entry, refusal: Refusal, now: float) -> Rejected:
        self._move(entry, Move.EXPIRE)
        self.counters.rejected[entry.ask.tier] += 1
        if refusal is Refusal.ADMISSION_TIMEOUT:
            self.counters.timed_out[entry.ask.tier] += 1
        scene = Scene(self.name, self.slots, self.in_use, self.waiting, self._rules.max_queue)
        message = sentence(refusal, entry.ask, scene, waited_s=now - entry.asked_at)
        return Rejected(entry.ticket, refusal, message, self._retry_after(entry, refusal, now))

    def _lift(self, entry: Entry) -> None:
        if entry.state is _WAITING:
            self.line.remove(entry)
        lifted_at = entry.lift_at if entry.lift_at is not None else entry.asked_at
        entry.tier = Tier(entry.tier + 1)
        if self._fair:
            entry.key = (self._fair[entry.tier].arrived(entry.ask.principal, entry.ask.units), entry.key[1])
        if entry.state is _WAITING:
            self.line.add(entry)
        self._schedule_lift(entry, lifted_at)

    def _schedule_lift(self, entry: Entry, since: float) -> None:
        if self._rules.ageing_s is None or entry.tier is BEST_FIRST[0]:
            entry.lift_at = None
        else:
            entry.lift_at = since + self._rules.ageing_s
            self._lifts.add(entry.ticket, entry.lift_at)

    # ---- what a caller is told ------------------------------------------------------------------------------------

    def _retry_after(self, entry: Entry, refusal: Refusal, now: float) -> float | None:
        """When everybody who is served before such an ask, and then the ask itself, has probably been served."""
        if refusal is Refusal.DRAINING:
            return RESTART_S
        if refusal is Refusal.NO_CAPACITY:
            return None
        drained = self.drain_rate.seconds_for(self.line.served_before(entry.tier) + 1, now)
        reopens = self._closed.get(entry.ask.modality)
        if reopens is None:
            return drained
        return min(max(0.0, reopens - now) + (drained or 0.0), LONGEST_S)
