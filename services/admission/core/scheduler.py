"""The scheduler of all pools: asks come in by ticket, events go out as values. Nothing here knows a clock or a socket."""

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from services.admission.core.entry import Entry, State
from services.admission.core.model import (
    Ask,
    Event,
    Hold,
    Modality,
    PoolSpec,
    Queued,
    Refusal,
    Rejected,
    Rules,
)
from services.admission.core.pool import Pool
from services.admission.core.refusals import DRAINING, RESTART_S

TOLD_FIRST_S = 0.2
TOLD_AGAIN_S = 1.0


class Scheduler:
    """All pools. Tickets are chosen by the caller and unique among live asks; times never go back."""

    def __init__(self, pools: Iterable[PoolSpec], rules: Rules) -> None:
        self.rules = rules
        self.draining = False
        self._live: dict[int, Entry] = {}
        self.pools = {spec.name: Pool(spec, rules, self._live) for spec in pools}
        self.holds: dict[str, Hold] = {}

    # ---- asks -----------------------------------------------------------------------------------------------------

    def ask(self, ticket: int, ask: Ask, now: float) -> list[Event]:
        """Ask for a permit: exactly one of Granted, Queued or Rejected for this ticket is among the events.

        Raises ValueError for a ticket that is live and for units that the pool does not have, KeyError for an unknown
        pool: `intake.resolve` has refused both before.
        """
        pool = self.pools[ask.pool]
        if ticket in self._live:
            raise ValueError(f"ticket {ticket} is live already")
        if ask.units > pool.slots > 0 or ask.units < 0:
            raise ValueError(f"{ask.units} slots asked, {pool.name} has {pool.slots}")
        if self.draining:
            return [Rejected(ticket, Refusal.DRAINING, DRAINING, RESTART_S)]
        entry = self._live[ticket] = Entry(ticket, ask, now)
        return pool.ask(entry, now)

    def release(self, ticket: int, now: float) -> list[Event]:
        """Give a permit back or withdraw an ask; a ticket that is over already is no error."""
        entry = self._live.get(ticket)
        if entry is None:
            return []
        return self.pools[entry.ask.pool].leave(entry, now)

    def park(self, tickets: Collection[int], now: float) -> list[Event]:
        """Let asks step out of the line, all at once: none of them gets what another leaves behind.

        No effect on an ask that does not wait.
        """
        entries = [entry for ticket in tickets if (entry := self._live.get(ticket)) is not None]
        return [event for pool, each in self._by_pool(entries) for event in pool.park(each, now)]

    def ready(self, ticket: int, now: float) -> list[Event]:
        """Step back into the line; no effect on an ask that is not parked."""
        entry = self._live.get(ticket)
        return self.pools[entry.ask.pool].ready(entry, now) if entry else []

    def adopt(self, ticket: int, ask: Ask, now: float) -> list[Event]:
        """Count a permit that its holder brings along from before (see Pool.adopt). Raises as `ask` does."""
        if ticket in self._live:
            raise ValueError(f"ticket {ticket} is live already")
        entry = self._live[ticket] = Entry(ticket, ask, now)
        return self.pools[ask.pool].adopt(entry, now)

    def is_holding(self, ticket: int) -> bool:
        """Whether the ticket holds a permit."""
        entry = self._live.get(ticket)
        return entry is not None and entry.state is State.HOLDING

    # ---- time -----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Event]:
        """Do everything that is due at `now`: deadlines, ageing, the end of holds."""
        # Who is served is decided by how everybody stands now: ageing comes first, and holds that are over end together.
        events = [event for pool in self.pools.values() for event in pool.age(now)]
        expired = [hold.hold_id for hold in self.holds.values() if hold.until <= now]
        for hold_id in expired:
            del self.holds[hold_id]
        if expired:
            events += self._apply_holds(now)
        for pool in self.pools.values():
            events += pool.serve(now)
        return events

    def next_due(self) -> float | None:
        """Return the time at which `advance` is needed next, or None."""
        times = [due for pool in self.pools.values() if (due := pool.next_due()) is not None]
        times += [hold.until for hold in self.holds.values()]
        return min(times, default=None)

    # ---- holds ----------------------------------------------------------------------------------------------------

    def hold(self, hold: Hold, now: float) -> list[Event]:
        """Put a hold in force, or replace the one with its id; `in_flight` tells what it waits for."""
        self.holds[hold.hold_id] = hold
        return self._apply_holds(now)

    def release_hold(self, hold_id: str, now: float) -> list[Event]:
        """End a hold; an unknown one is no error."""
        return self._apply_holds(now) if self.holds.pop(hold_id, None) else []

    def in_flight(self, hold: Hold) -> int:
        """Count the permits that a hold waits for."""
        total = sum(self.pools[name].in_flight[modality] for name in hold.pools for modality in hold.modalities)
        for ticket in hold.excluded:
            entry = self._live.get(ticket)
            if entry is None or entry.state is not State.HOLDING:
                continue
            if entry.ask.pool in hold.pools and entry.ask.modality in hold.modalities:
                total -= 1
        return total

    def _apply_holds(self, now: float) -> list[Event]:
        events: list[Event] = []
        for pool in self.pools.values():
            closed: dict[Modality, float] = {}
            for hold in self.holds.values():
                if pool.name in hold.pools:
                    closed |= {one: max(hold.until, closed.get(one, hold.until)) for one in hold.modalities}
            events += pool.close(closed, now)
        return events

    # ---- the end, and what is told --------------------------------------------------------------------------------

    def drain(self, now: float) -> list[Event]:
        """Refuse whoever waits and whoever comes from now on; permits stay with their holders."""
        self.draining = True
        by_pool = self._by_pool(self._live.values())
        return [event for pool, each in by_pool for event in pool.refuse(each, Refusal.DRAINING, now)]

    def _by_pool(self, entries: Iterable[Entry]) -> list[tuple[Pool, list[Entry]]]:
        found: dict[str, list[Entry]] = {}
        for entry in entries:
            found.setdefault(entry.ask.pool, []).append(entry)
        return [(self.pools[name], each) for name, each in found.items()]

    def positions(self, pool: str, seen: range, now: float) -> Iterator[Queued]:
        """Return the news for those at the places `seen` (0 is next) who have not been told of them.

        A place is news when it has changed and the last news is TOLD_AGAIN_S old, or the ask waits for TOLD_FIRST_S: most
        waits are over before. This walks the line, so callers do it by the clock and page by page, never per release.
        """
        state = self.pools[pool]
        rate = state.drain_rate.per_second(now)
        for place, entry in enumerate(islice(state.line.in_order(), seen.start, seen.stop), seen.start + 1):
            if entry.told != place and now - entry.told_at >= (TOLD_AGAIN_S if entry.told else TOLD_FIRST_S):
                entry.told, entry.told_at = place, now
                yield Queued(entry.ticket, place, place / rate if rate else None)
