"""Admission as a whole, still pure: scheduler, sessions, holds and what a restart must remember.

Messages come in as method calls with the time; what is to be delivered to whom goes out as values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from services.admission.core.model import ALL_MODALITIES, Ask, Event, Hold, Rejected
from services.admission.core.remains import Remains, Use, Uses
from services.admission.core.scheduler import Scheduler
from services.admission.core.sessions import Session, Sessions, SessionState

# The hold that keeps a restarted admission from granting what is still in use.
SETTLING = "admission:settling"
# So many places are looked at, and so many waiters told, at once: a long line must not hold up grants.
SEEN_AT_ONCE = 1_000
TOLD_AT_ONCE = 100


class Delivery(NamedTuple):
    """An event and its addressee: the ask `number` of a session, or the ticket `number` when there is no session."""

    session_id: str | None
    number: int
    event: Event


@dataclass(frozen=True, slots=True)
class Held:
    """A permit that a session brings along."""

    ask_id: int
    permit_id: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class Memory:
    """What survives a restart.

    Sessions by id with their service, the holds in force (times on the desk's clock), and what exchanges behind the
    gate take.
    """

    sessions: tuple[tuple[str, str], ...]
    holds: tuple[Hold, ...]
    uses: tuple[Use, ...] = ()


class Desk:
    """Takes asks from single callers and from sessions.

    `epoch` grows with every start. `past` is what the process before remembered: its sessions are waited for, for at
    most `settle_s`, before anything is granted, and so is the count of its exchanges behind the gate; its holds are in
    force again.
    """

    def __init__(
        self, scheduler: Scheduler, *, epoch: int, past: Memory, grace_s: float, settle_s: float, now: float
    ) -> None:
        self.scheduler = scheduler
        self.epoch = epoch
        self.sessions = Sessions()
        self.missing = dict(past.sessions) if settle_s > 0 else {}
        self.is_uncounted = settle_s > 0 and bool(past.uses)
        self.remains = Remains(past.uses)
        self._uses = Uses()
        self.memory_version = 0
        self._grace_s = grace_s
        # Permit ids of other epochs, by ticket: few, and only for as long as they are held.
        self._adopted: dict[int, str] = {}
        for hold in past.holds:
            scheduler.hold(hold, now)
        if self.missing or self.is_uncounted:
            reason = f"waiting for {len(self.missing)} sessions from before the restart"
            reason += ", and for the count of exchanges" if self.is_uncounted else ""
            pools = frozenset(scheduler.pools)
            scheduler.hold(Hold(SETTLING, pools, ALL_MODALITIES, now + settle_s, reason), now)

    # ---- single callers -------------------------------------------------------------------------------------------

    def ask(self, ticket: int, ask: Ask, now: float) -> list[Delivery]:
        """Ask as a single caller; see Scheduler.ask."""
        return self._address(self.scheduler.ask(ticket, ask, now))

    def release(self, ticket: int, now: float) -> list[Delivery]:
        """Give a permit back or withdraw an ask, however its stream ended."""
        return self._address(self.scheduler.release(ticket, now))

    def park(self, ticket: int, now: float) -> list[Delivery]:
        """See Scheduler.park."""
        return self._address(self.scheduler.park([ticket], now))

    def ready(self, ticket: int, now: float) -> list[Delivery]:
        """See Scheduler.ready."""
        return self._address(self.scheduler.ready(ticket, now))

    # ---- sessions -------------------------------------------------------------------------------------------------

    def open_session(
        self, session_id: str, service: str, held: Sequence[tuple[int, Held]], now: float
    ) -> list[Delivery]:
        """Open or resume a session; `held` are the permits it brings along, each with a ticket to use if it is unknown.

        What the session held and does not bring along has been released while it was away. Raises
        SessionConflictError while it is open elsewhere.
        """
        session = self.sessions.open(session_id, service)
        self.memory_version += 1
        brought = {each.ask_id for _, each in held}
        events: list[Event] = []
        # What is in use is counted before anything is handed over.
        for ticket, each in held:
            known = session.tickets.get(each.ask_id)
            if known is not None and self.scheduler.is_holding(known):
                continue
            if known is not None:
                events += self._give_back(known, now)
            self.sessions.add(session, each.ask_id, ticket)
            self._adopted[ticket] = each.permit_id
            events += self.scheduler.adopt(ticket, each.ask, now)
        for ask_id, ticket in list(session.tickets.items()):
            if ask_id not in brought and self.scheduler.is_holding(ticket):
                events += self._give_back(ticket, now)
        self.sessions.set_due(session, now + self._grace_s if session.unclaimed else None)
        return self._address(events) + self._no_longer_missing(session_id, now)

    def session_ask(self, session_id: str, ask_id: int, ticket: int, ask: Ask, now: float) -> list[Delivery]:
        """Ask within a session; after a loss the same ask id claims its place in the line. Raises DuplicateAskError."""
        session = self.sessions.by_id[session_id]
        place = session.tickets.get(ask_id)
        if place is not None and place in session.unclaimed:
            session.unclaimed.discard(place)
            return self._address(self.scheduler.ready(place, now))
        self.sessions.add(session, ask_id, ticket)
        return self._address(self.scheduler.ask(ticket, ask, now))

    def session_release(self, session_id: str, ask_id: int, now: float) -> list[Delivery]:
        """Give a session's permit back or withdraw its ask; an ask that is over already is no error."""
        ticket = self.sessions.by_id[session_id].tickets.get(ask_id)
        return [] if ticket is None else self._address(self._give_back(ticket, now))

    def session_park(self, session_id: str, ask_id: int, now: float) -> list[Delivery]:
        """Let one ask of a session step out of the line."""
        ticket = self.sessions.by_id[session_id].tickets.get(ask_id)
        return [] if ticket is None else self.park(ticket, now)

    def session_ready(self, session_id: str, ask_id: int, now: float) -> list[Delivery]:
        """Let one ask of a session step back in."""
        ticket = self.sessions.by_id[session_id].tickets.get(ask_id)
        return [] if ticket is None else self.ready(ticket, now)

    def lose_session(self, session_id: str, now: float) -> list[Delivery]:
        """Note that a session's stream broke: its permits stay for the grace, its asks keep their place unserved."""
        session = self.sessions.by_id[session_id]
        self.sessions.lose(session, now + self._grace_s)
        session.unclaimed = {t for t in session.tickets.values() if not self.scheduler.is_holding(t)}
        return self._address(self.scheduler.park(session.unclaimed, now))

    def end_session(self, session_id: str, now: float) -> list[Delivery]:
        """End a session, closed by its service or of a dead process: everything comes back at once."""
        session = self.sessions.by_id.get(session_id)
        deliveries = [] if session is None else self._address(self._end(session, now))
        return deliveries + self._no_longer_missing(session_id, now)

    # ---- exchanges behind the gate --------------------------------------------------------------------------------

    def note_use(self, upstream: str, ask: Ask) -> None:
        """Take note of what an exchange at an upstream takes, for the next start. Before the first of them is let in."""
        if self._uses.note(Use(upstream, ask.pool, ask.modality, ask.units)):
            self.memory_version += 1

    def count_past(self, running: Mapping[str, int], tickets: Iterator[int], now: float) -> list[Delivery]:
        """Count exactly the exchanges of before the restart that still run, by upstream; each keeps its slots.

        The first count ends the waiting for it. `tickets` gives new ones.
        """
        change = self.remains.match(running, tickets)
        events: list[Event] = []
        for ticket, ask in change.begun:
            if ask.pool in self.scheduler.pools:
                units = min(ask.units, self.scheduler.pools[ask.pool].slots)
                events += self.scheduler.adopt(ticket, ask._replace(units=units), now)
        for ticket in change.ended:
            events += self.scheduler.release(ticket, now)
        if not self.is_uncounted:
            return self._address(events)
        self.is_uncounted = False
        return self._address(events) + self._settled(now)

    # ---- time, holds, the end -------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Delivery]:
        """Do everything that is due: deadlines, ageing, holds, graces of lost sessions."""
        holds = len(self.scheduler.holds)
        deliveries = self._address(self.scheduler.advance(now))
        for session in self.sessions.timed():
            if session.due is None or session.due > now:
                continue
            if session.state is SessionState.LOST:
                deliveries += self._address(self._end(session, now))
            else:
                self.sessions.set_due(session, None)
                for ticket in sorted(session.unclaimed):
                    deliveries += self._address(self._give_back(ticket, now))
        if len(self.scheduler.holds) < holds:
            self.memory_version += 1
            self._forget_missing_when_settled()
        return deliveries

    def next_due(self) -> float | None:
        """Return when `advance` has something to do next, or None."""
        times = [session.due for session in self.sessions.timed() if session.due is not None]
        due = self.scheduler.next_due()
        return min(times if due is None else [*times, due], default=None)

    def hold(self, hold: Hold, now: float) -> list[Delivery]:
        """Put a hold in force or replace the one with its id."""
        self.memory_version += 1
        return self._address(self.scheduler.hold(hold, now))

    def release_holds(self, hold_ids: Iterable[str], now: float) -> list[Delivery]:
        """End holds; unknown ones are no error."""
        self.memory_version += 1
        return self._address([event for one in hold_ids for event in self.scheduler.release_hold(one, now)])

    def drain(self, now: float) -> list[Delivery]:
        """Refuse whoever waits and whoever comes from now on."""
        return self._address(self.scheduler.drain(now))

    # ---- what is asked of it --------------------------------------------------------------------------------------

    def places(self, pool: str, start: int, now: float) -> tuple[list[Delivery], int]:
        """Return some news of places in the line from a place on (0 is next), and where to go on the next time."""
        seen = range(start, start + SEEN_AT_ONCE)
        news = list(islice(self.scheduler.positions(pool, seen, now), TOLD_AT_ONCE))
        return self._address(list[Event](news)), news[-1].position if len(news) == TOLD_AT_ONCE else seen.stop

    def absent(self) -> list[str]:
        """Return the sessions that may come back: lost ones, and those of the process before that are still missed."""
        lost = [one.session_id for one in self.sessions.timed() if one.state is SessionState.LOST]
        return lost + list(self.missing)

    def permit_id(self, ticket: int) -> str:
        """Return the id of a permit granted by this process, unique over restarts."""
        return f"{self.epoch}-{ticket}"

    def ticket_of(self, permit_id: str) -> int | None:
        """Return the ticket of a permit that is held, or None."""
        epoch, _, number = permit_id.partition("-")
        if epoch == str(self.epoch) and number.isdecimal():
            return int(number) if self.scheduler.is_holding(int(number)) else None
        return next((ticket for ticket, known in self._adopted.items() if known == permit_id), None)

    def memory(self) -> Memory:
        """Return what the next start must know; sessions that are still missed stay remembered."""
        sessions = {session.session_id: session.service for session in self.sessions.by_id.values()} | self.missing
        holds = tuple(hold for hold in self.scheduler.holds.values() if hold.hold_id != SETTLING)
        # What the past took is forgotten with its last exchange: settings may have made it cheaper.
        past = self.remains.uses if self.is_uncounted or self.remains else Uses()
        return Memory(tuple(sessions.items()), holds, Uses((*past.all(), *self._uses.all())).all())

    # ---- within ---------------------------------------------------------------------------------------------------

    def _give_back(self, ticket: int, now: float) -> list[Event]:
        self.sessions.remove(ticket)
        self._adopted.pop(ticket, None)
        return self.scheduler.release(ticket, now)

    def _end(self, session: Session, now: float) -> list[Event]:
        self.memory_version += 1
        tickets = self.sessions.end(session)
        # First all of them out of the line, so that nothing is handed from one to the other on the way out.
        events = [event for event in self.scheduler.park(tickets, now) if event.ticket not in tickets]
        return events + [event for ticket in tickets for event in self._give_back(ticket, now)]

    def _no_longer_missing(self, session_id: str, now: float) -> list[Delivery]:
        if self.missing.pop(session_id, None) is None:
            return []
        self.memory_version += 1
        return self._settled(now)

    def _settled(self, now: float) -> list[Delivery]:
        return [] if self.missing or self.is_uncounted else self.release_holds([SETTLING], now)

    def _forget_missing_when_settled(self) -> None:
        if SETTLING not in self.scheduler.holds:
            self.missing.clear()
            self.is_uncounted = False

    def _address(self, events: list[Event]) -> list[Delivery]:
        deliveries = []
        for event in events:
            owner = self.sessions.owner(event.ticket)
            if owner is None:
                deliveries.append(Delivery(None, event.ticket, event))
            else:
                deliveries.append(Delivery(owner[0].session_id, owner[1], event))
                if isinstance(event, Rejected):
                    self.sessions.remove(event.ticket)
        return deliveries
