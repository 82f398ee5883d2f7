"""The owner of the desk: every message is taken in turn on one event loop, and every event finds its inbox.

Calls are synchronous and never wait, so no two of them can interleave; what takes time is told through inboxes.
"""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from services.admission.adapters.memory_file import MemoryFile
from services.admission.core.desk import Delivery, Desk, Held
from services.admission.core.model import Ask, Event, Hold, Queued
from services.admission.core.remains import own_side
from services.admission.core.sessions import DuplicateAskError, SessionConflictError
from services.kit import telemetry
from services.kit.clock import Clock

_log = telemetry.logger(__name__)

TOLD_EVERY_S = 0.1
"""How often it is looked who should hear of a place in the line."""
PROBED_EVERY_S = 0.25
"""How often it is looked whether the process of an absent session is dead."""

Hear = Callable[[int, Event], None]
"""Takes the event of a ticket, at once; it must not call the keeper."""


@dataclass(slots=True)
class Inbox:
    """Events for one stream, in order. None says that the stream is over."""

    events: asyncio.Queue[tuple[int, Event] | None] = field(default_factory=asyncio.Queue)

    def put(self, number: int, event: Event) -> None:
        """Add the event of an ask."""
        self.events.put_nowait((number, event))

    async def news(self) -> AsyncIterator[tuple[int, Event]]:
        """Give the events until the stream is over, leaving out news of places that something newer has overtaken."""
        while True:
            batch = [await self.events.get()]
            while not self.events.empty():
                batch.append(self.events.get_nowait())
            newest = {item[0]: item for item in batch if item is not None}
            for item in batch:
                if item is None:
                    return
                if not isinstance(item[1], Queued) or not item[1].position or newest[item[0]] is item:
                    yield item


class Keeper:
    """Owns the desk, its timer, and the way from events to inboxes. `run` must be running.

    `is_dead` says whether the process of a session certainly runs no more. `side` is where the gate lets requests in.
    """

    def __init__(self, desk: Desk, clock: Clock, memory: MemoryFile, is_dead: Callable[[str], bool]) -> None:
        self.desk = desk
        self.draining = False
        self.side = own_side(desk.epoch)
        self._clock = clock
        self._is_dead = is_dead
        self._broken: Exception | None = None
        self._memory = memory
        self._remembered = -1
        self._tickets = itertools.count(1)
        self._callers: dict[int, Hear] = {}
        self._sessions: dict[str, Inbox] = {}
        self._changed: asyncio.Event | None = None
        self._wakes_at = math.inf
        self._woken = asyncio.Event()
        self._pages: dict[str, int] = {}

    def now(self) -> float:
        """Return the desk's time, seconds."""
        return self._clock.monotonic()

    # ---- single callers -------------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> tuple[int, Inbox]:
        """Ask as a single caller; events come as (ticket, event) into the inbox."""
        inbox = Inbox()
        return self.attend(ask, inbox.put), inbox

    def attend(self, ask: Ask, hear: Hear) -> int:
        """Ask as a single caller who hears of events at once, also before this returns; return the ticket."""
        ticket = next(self._tickets)
        self._callers[ticket] = hear
        self._ask(ask, partial(self.desk.ask, ticket, ask))
        return ticket

    def leave(self, ticket: int) -> None:
        """Give the permit back or withdraw the ask: the stream is over."""
        self._callers.pop(ticket, None)
        self._turn(lambda now: self.desk.release(ticket, now))

    def park(self, ticket: int) -> None:
        """Step out of the line."""
        self._turn(lambda now: self.desk.park(ticket, now))

    def ready(self, ticket: int) -> None:
        """Step back into the line."""
        self._turn(lambda now: self.desk.ready(ticket, now))

    # ---- sessions -------------------------------------------------------------------------------------------------

    def open_session(self, session_id: str, service: str, held: Iterable[Held]) -> Inbox:
        """Open or resume a session; events come as (ask id, event). Raises SessionConflictError."""
        if session_id in self._sessions:
            raise SessionConflictError(f"session {session_id!r} is open")
        brought = [(next(self._tickets), each) for each in held]
        inbox = self._sessions[session_id] = Inbox()
        try:
            self._turn(lambda now: self.desk.open_session(session_id, service, brought, now))
        except SessionConflictError:
            del self._sessions[session_id]
            raise
        return inbox

    def session_ask(self, session_id: str, ask_id: int, ask: Ask) -> None:
        """Ask within a session. Raises DuplicateAskError."""
        ticket = next(self._tickets)
        self._ask(ask, partial(self.desk.session_ask, session_id, ask_id, ticket, ask))

    def session_release(self, session_id: str, ask_id: int) -> None:
        """Give a permit of a session back, or withdraw an ask."""
        self._turn(lambda now: self.desk.session_release(session_id, ask_id, now))

    def session_park(self, session_id: str, ask_id: int) -> None:
        """Let one ask of a session step out of the line."""
        self._turn(lambda now: self.desk.session_park(session_id, ask_id, now))

    def session_ready(self, session_id: str, ask_id: int) -> None:
        """Let one ask of a session step back in."""
        self._turn(lambda now: self.desk.session_ready(session_id, ask_id, now))

    def lose_session(self, session_id: str) -> None:
        """Note that a session's stream broke; no effect on one that has ended."""
        if self._sessions.pop(session_id, None) is not None:
            self._turn(lambda now: self.desk.lose_session(session_id, now))
            self._woken.set()  # from now on it is probed

    def end_session(self, session_id: str) -> None:
        """End a session that its service has closed."""
        self._sessions.pop(session_id, None)
        self._turn(lambda now: self.desk.end_session(session_id, now))

    # ---- exchanges behind the gate --------------------------------------------------------------------------------

    def note_use(self, upstream: str, ask: Ask) -> None:
        """Take note of what an exchange at an upstream takes, so that the next start knows it."""
        self.desk.note_use(upstream, ask)
        self._deliver([])  # which remembers what has changed

    def count_past(self, running: Mapping[str, int]) -> None:
        """Count the exchanges of before the restart that still run, by upstream."""
        self._turn(lambda now: self.desk.count_past(running, self._tickets, now))

    # ---- holds ----------------------------------------------------------------------------------------------------

    def hold(self, hold: Hold) -> None:
        """Put a hold in force."""
        self._turn(lambda now: self.desk.hold(hold, now))

    async def drained(self, hold: Hold, wait_s: float) -> int:
        """Wait until nothing that a hold stops is in flight, the hold is over, or time is; return the permits left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while hold.hold_id in self.desk.scheduler.holds and self.desk.scheduler.in_flight(hold):
                    await self.next_change().wait()
        return self.desk.scheduler.in_flight(hold)

    def release_holds(self, hold_ids: list[str]) -> None:
        """End holds."""
        self._turn(lambda now: self.desk.release_holds(hold_ids, now))

    # ---- the end --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Close every session and refuse single callers who wait.

        A session's service keeps its permits, reconnects to the next process and claims its places there: a restart
        refuses nobody.
        """
        self.draining = True
        for session_id, inbox in list(self._sessions.items()):
            self.lose_session(session_id)
            inbox.events.put_nowait(None)
        self._turn(self.desk.drain)

    # ---- time -----------------------------------------------------------------------------------------------------

    def next_change(self) -> asyncio.Event:
        """Return the event that the next turn sets."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    async def run(self) -> None:
        """Keep the time: deadlines, holds, graces, news of places in the line, and the deaths of absent sessions.

        Raises what a turn has raised unexpectedly: a desk that is wrong about who holds what must not go on.
        """
        told = probed = self.now()
        self._bury_the_dead()
        while True:
            waiting = any(pool.waiting for pool in self.desk.scheduler.pools.values())
            tell_at = told + TOLD_EVERY_S if waiting else math.inf
            probe_at = probed + PROBED_EVERY_S if self.desk.absent() else math.inf
            due = self.desk.next_due()
            self._wakes_at = min(tell_at, probe_at, math.inf if due is None else due)
            self._woken.clear()
            await self._sleep_until(self._wakes_at)
            if self._broken is not None:
                raise self._broken
            now = self.now()
            if now >= tell_at:
                told = now
                self._turn(self._tell_places)
            if now >= probe_at:
                probed = now
                self._bury_the_dead()
            self._turn(self.desk.advance)

    def _bury_the_dead(self) -> None:
        for session_id in self.desk.absent():
            if self._is_dead(session_id):
                self._turn(partial(self.desk.end_session, session_id))

    async def _sleep_until(self, at: float) -> None:
        try:
            async with asyncio.timeout(None if at == math.inf else max(0.0, at - self.now())):
                await self._woken.wait()
        except TimeoutError:
            return

    def _tell_places(self, now: float) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for name, pool in self.desk.scheduler.pools.items():
            start = self._pages.get(name, 0)
            start = start if start < pool.waiting else 0
            news, self._pages[name] = self.desk.places(name, start, now)
            deliveries += news
        return deliveries

    # ---- a turn ---------------------------------------------------------------------------------------------------

    def _ask(self, ask: Ask, act: Callable[[float], list[Delivery]]) -> None:
        """Take a turn for a new ask. Who waits hears of its place by the timer, since most waits are short."""
        deliveries = self._act(act)
        others = [one for one in deliveries if not isinstance(one.event, Queued)]
        self._deliver(others)
        if len(others) < len(deliveries):
            ageing_s = self.desk.scheduler.rules.ageing_s or math.inf
            self._wake_within(min(ask.wait_s, ageing_s, TOLD_EVERY_S))

    def _turn(self, act: Callable[[float], list[Delivery]]) -> None:
        """Let the desk do something and deliver what comes of it."""
        self._deliver(self._act(act))

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for session_id, number, event in deliveries:
            if session_id is None:
                hear = self._callers.get(number)
                if hear is not None:
                    hear(number, event)
            else:
                inbox = self._sessions.get(session_id)
                if inbox is not None:
                    inbox.put(number, event)
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        if self.desk.memory_version != self._remembered:
            self._remembered = self.desk.memory_version
            self._remember()
            self._woken.set()  # sessions and holds come with times of their own

    def _wake_within(self, seconds: float) -> None:
        if self.now() + seconds < self._wakes_at:
            self._woken.set()

    def _act(self, act: Callable[[float], list[Delivery]]) -> list[Delivery]:
        try:
            return act(self.now())
        except (SessionConflictError, DuplicateAskError):
            raise  # refused before anything was changed
        except Exception as error:
            self._broken = error
            self._woken.set()
            raise

    def _remember(self) -> None:
        try:
            self._memory.write(self.desk.epoch, self.desk.memory())
        except OSError as error:
            # What a restart then does not know is waited for as an unknown session: too short, but work goes on.
            _log.error("what a restart must know cannot be written", error=str(error))
