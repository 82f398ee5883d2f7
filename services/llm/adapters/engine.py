"""The engine as the service sees it: requests go in, deltas come out, and a host that dies is started again."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from services.kit import telemetry
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.llm.adapters.host_process import HostProcess
from services.llm.core.lifecycle import BackOff, Event, State, after, is_stuck
from services.llm.core.wire import (
    Cancel,
    Counters,
    Delta,
    EngineConfig,
    FromEngine,
    LoadFailed,
    Loading,
    Probe,
    Progress,
    Ready,
    Step,
    Submit,
)

_WATCH_S: Final = 1.0
_log = telemetry.logger(__name__)


class EngineUnusableError(Exception):
    """The engine can never start with these settings; the message says why."""


class Sink(Protocol):
    """Who is told what a request gains. Called in the event loop; must not block or raise."""

    def delta(self, delta: Delta) -> None:
        """Take what a choice gained."""

    def progress(self, progress: Progress) -> None:
        """Take how much of the prompt is processed."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`load_s`: how long a load may stay silent; `stuck_s`: how long a step may take, 0 for ever.

    `loads`: how many times in a row a load may die before it is given up, None for ever. One that llama.cpp refuses is
    given up at once then.
    """

    load_s: float = 600.0
    stuck_s: float = 120.0
    loads: int | None = None
    back_off: BackOff = field(default_factory=BackOff)


@dataclass(slots=True)
class Ticket:
    """A request that the engine works on. `ended` is set when all its choices have, or fails with a DomainError."""

    submit: Submit
    sink: Sink
    open_choices: int
    ended: asyncio.Future[None]


@dataclass(slots=True)
class EngineReport:
    """What is known about the engine without asking it. `past`: counters of hosts that are gone."""

    state: State = State.AVAILABLE
    pid: int | None = None
    ready: Ready | None = None
    progress: float | None = None
    failure: str | None = None
    crashes: int = 0
    stuck: bool = False
    now: Counters = field(default_factory=Counters)
    past: Counters = field(default_factory=Counters)


class Engine:
    """Supervises one engine host. `on_state` hears of every change of state."""

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        clock: Clock,
        *,
        environ: Mapping[str, str],
        on_state: Callable[[State], None],
    ) -> None:
        self.report = EngineReport()
        self._config = config
        self._limits = limits
        self._clock = clock
        self._environ = environ
        self._on_state = on_state
        self._host: HostProcess[FromEngine] | None = None
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._stepped = asyncio.Event()
        self._heard_s = 0.0
        self._serving_from_s: float | None = None
        self._refused = False
        self._unusable: str | None = None

    # ---- requests ---------------------------------------------------------------------------------------------

    @property
    def changed(self) -> asyncio.Event:
        """The event that the next news of a load sets. Take it before looking, so that none is missed."""
        return self._changed

    def submit(self, submit: Callable[[int], Submit], sink: Sink) -> Ticket:
        """Give a request to the engine. Raises DomainError `engine_failed` when it is not ready after all."""
        if self._host is None or self.report.state is not State.READY:
            raise _failed("the engine stopped before the request began")
        message = submit(next(self._numbers))
        ticket = Ticket(message, sink, message.choices, asyncio.get_running_loop().create_future())
        if not self._tickets:
            self._heard_s = self._clock.monotonic()  # an idle host says nothing, and that is no sign of trouble
        self._tickets[message.request] = ticket
        self._host.send(message)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request; nothing happens when it has ended already."""
        if self._tickets.pop(ticket.submit.request, None) is not None and self._host is not None:
            self._host.send(Cancel(ticket.submit.request))

    async def counters(self, *, wait_s: float) -> Counters:
        """Ask the engine for its counters between two steps; the last known ones when it does not answer in time."""
        if self._host is not None and self.report.state is State.READY:
            self._host.send(Probe())
            stepped = self._stepped
            try:
                async with asyncio.timeout(wait_s):
                    await stepped.wait()
            except TimeoutError:
                pass
        return self.report.now

    # ---- the host ---------------------------------------------------------------------------------------------

    async def supervise(self) -> None:
        """Keep a host running until cancelled; when this is left, however, there is none any more.

        Returns when the load is given up. Raises EngineUnusableError when trying again is pointless.
        """
        failures = 0
        try:
            while True:
                self._enter(Event.START)
                served_s = await self._serve()
                failures = self._limits.back_off.failures(failures, served_s=served_s)
                if self._limits.loads is not None and (self._refused or failures >= self._limits.loads):
                    return
                await asyncio.sleep(self._limits.back_off.pause_s(failures))
        except asyncio.CancelledError:
            self._retire()
            raise

    async def _serve(self) -> float:
        """Run one host to its end; return how long it served, seconds."""
        self._heard_s = self._clock.monotonic()
        self._serving_from_s, self._refused = None, False
        host = await HostProcess[FromEngine].start("engine", FromEngine, self._hear, environ=self._environ)
        self._host, self.report.pid = host, host.pid
        try:
            host.send(self._config)
            why = await self._watch(host)
        except asyncio.CancelledError:
            if self.report.state is State.LOADING:
                host.kill()  # while it loads it does not hear the socket close
            self._enter(Event.STOP)
            raise
        finally:
            self._host, self.report.pid = None, None
            await host.stop()
        now_s = self._clock.monotonic()
        served_s = 0.0 if self._serving_from_s is None else now_s - self._serving_from_s
        self._bury(why)
        return served_s

    def _retire(self) -> None:
        """Note that the host was ended on purpose."""
        if self.report.state in {State.LOADING, State.FAILED}:
            self._enter(Event.STOP)
        self._settle()
        if self.report.state is State.UNLOADING:
            self._enter(Event.STOPPED)

    async def _watch(self, host: HostProcess[FromEngine]) -> str:
        """Wait for the host's end and return how it came; a host that is stuck is killed."""
        while True:
            try:
                async with asyncio.timeout(_WATCH_S):
                    await host.wait_closed()
            except TimeoutError:
                silent_s = self._clock.monotonic() - self._heard_s
                loading = self.report.state is State.LOADING
                limit_s = self._limits.load_s if loading else self._limits.stuck_s
                if is_stuck(active=1 if loading else len(self._tickets), silent_s=silent_s, limit_s=limit_s):
                    self.report.stuck = True
                    host.kill()
                    await host.ended()
                    return f"it did nothing for {silent_s:.0f} s and was killed"
            else:
                return await host.ended()

    def _hear(self, message: FromEngine) -> None:
        self._heard_s = self._clock.monotonic()
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Loading):
            self.report.progress = message.progress
            self._tell()
        elif isinstance(message, Ready):
            self.report.ready, self.report.failure, self.report.progress = message, None, None
            self._serving_from_s = self._heard_s
            self._enter(Event.LOADED)
        else:
            self._load_failed(message)

    def _step(self, step: Step) -> None:
        self.report.now = step.counters
        self._stepped.set()
        self._stepped = asyncio.Event()
        for progress in step.progress:
            ticket = self._tickets.get(progress.request)
            if ticket is not None:
                ticket.sink.progress(progress)
        for delta in step.deltas:
            ticket = self._tickets.get(delta.request)
            if ticket is None:
                continue  # cancelled, while this was on its way
            ticket.sink.delta(delta)
            if delta.finish is not None:
                ticket.open_choices -= 1
                if ticket.open_choices == 0:
                    del self._tickets[delta.request]
                    _end(ticket, None)
        for failure in step.failures:
            ticket = self._tickets.pop(failure.request, None)
            if ticket is not None:
                _end(ticket, DomainError(Reason(failure.reason), failure.message, field=failure.field))

    def _load_failed(self, message: LoadFailed) -> None:
        self.report.failure = message.message
        self._refused = True
        self._unusable = message.message if message.permanent else None
        self._enter(Event.LOAD_FAILED)

    def _bury(self, why: str) -> None:
        """Account for a host that is gone: its requests fail, its counters stay."""
        if self._unusable is not None:
            raise EngineUnusableError(self._unusable)
        report = self.report
        if report.state is not State.FAILED:
            report.failure = f"the engine died: {why}"
            report.crashes += 1
            _log.error("engine host died", why=why, requests=len(self._tickets), crashes=report.crashes)
            self._enter(Event.DIED)
        else:
            _log.error("model did not load", why=report.failure)
        self._settle()
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            _end(ticket, _failed(f"the engine failed while it worked on this request: {why}; it starts again"))

    def _settle(self) -> None:
        """Keep the counts of a host that is gone, and forget what was true of it alone."""
        report = self.report
        report.ready, report.progress, report.stuck = None, None, False
        report.past, report.now = add_counters(report.past, report.now), Counters()

    def _enter(self, event: Event) -> None:
        self.report.state = after(self.report.state, event)
        self._on_state(self.report.state)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _end(ticket: Ticket, error: DomainError | None) -> None:
    if ticket.ended.done():
        return
    if error is None:
        ticket.ended.set_result(None)
    else:
        ticket.ended.set_exception(error)


def _failed(message: str) -> DomainError:
    return DomainError(Reason.ENGINE_FAILED, message)


def add_counters(past: Counters, now: Counters) -> Counters:
    """Return the totals of both and the present state of the second."""
    totals = (
        "steps",
        "prefill_tokens",
        "cached_tokens",
        "decode_tokens",
        "requests",
        "cancelled",
        "decode_us",
        "preemptions",
        "drafted",
        "accepted",
        "calls_saved",
    )
    sums = {name: getattr(past, name) + getattr(now, name) for name in totals}
    return msgspec.structs.replace(now, **sums)
