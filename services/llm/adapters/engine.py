"""The engine as the service sees it: requests go in, deltas come out, and a host that dies is started again."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, Self

import msgspec

from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.keeper import Ears, EngineLimits, Keeper, Report, Role
from services.kit.hosts.process import HostProcess
from services.llm.core.wire import (
    PROGRAM,
    Announce,
    Cancel,
    Counters,
    Delta,
    EngineConfig,
    FromEngine,
    Probe,
    Progress,
    Reading,
    Ready,
    Step,
    Submit,
)

ROLE: Final = Role(PROGRAM, "engine", FromEngine, Ready)


class Sink(Protocol):
    """Who is told what a request gains. Called in the event loop; must not block or raise."""

    def delta(self, delta: Delta) -> None:
        """Take what a choice gained."""

    def progress(self, progress: Progress) -> None:
        """Take how much of the prompt is processed."""

    def reading(self, reading: Reading) -> None:
        """Take how likely the prompt's tokens were, if that was asked for; before any delta."""


@dataclass(slots=True)
class Ticket:
    """A request that the engine works on. `ended` is set when all its choices have, or fails with a DomainError."""

    submit: Submit
    sink: Sink
    open_choices: int
    ended: asyncio.Future[None]


class Announcement:
    """A request that is being prepared: the engine waits a moment for it, unless it turns out not to come soon."""

    def __init__(self, host: HostProcess[FromEngine] | None) -> None:
        self._host = host
        if host is not None:
            host.send(Announce(1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()

    def withdraw(self) -> None:
        """Say that it has come, or will not come soon; once is enough."""
        host, self._host = self._host, None
        if host is not None:
            host.send(Announce(-1))


class Engine:
    """Supervises one engine host. `on_state` hears of every change of state; `past`: counters of hosts that are gone."""

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        clock: Clock,
        *,
        environ: Mapping[str, str],
        on_state: Callable[[State], None],
    ) -> None:
        ears = Ears(on_state, self._step, self._bury, self._work)
        self._keeper: Keeper[Ready] = Keeper(ROLE, config, limits, clock, ears, environ=environ)
        self.past = Counters()
        self._now = Counters()
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._stepped = asyncio.Event()

    @property
    def report(self) -> Report[Ready]:
        """What is known about the host without asking it."""
        return self._keeper.report

    def _work(self) -> int:
        return len(self._tickets)

    # ---- requests ---------------------------------------------------------------------------------------------

    def announce(self) -> Announcement:
        """Tell the engine that a request for it is being prepared."""
        return Announcement(self._keeper.host)

    def submit(self, submit: Callable[[int], Submit], sink: Sink) -> Ticket:
        """Give a request to the engine. Raises DomainError `engine_failed` when it is not ready after all."""
        if not self._keeper.serving:
            raise _failed("the engine stopped before the request began")
        message = submit(next(self._numbers))
        ticket = Ticket(message, sink, message.choices, asyncio.get_running_loop().create_future())
        self._keeper.send(message)
        self._tickets[message.request] = ticket
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request; nothing happens when it has ended already."""
        if self._tickets.pop(ticket.submit.request, None) is not None:
            self._keeper.send(Cancel(ticket.submit.request))

    async def counters(self, *, wait_s: float) -> Counters:
        """Ask the engine for its counters between two steps; the last known ones when it does not answer in time."""
        if self._keeper.serving:
            self._keeper.send(Probe())
            stepped = self._stepped
            try:
                async with asyncio.timeout(wait_s):
                    await stepped.wait()
            except TimeoutError:
                pass
        return self._now

    async def supervise(self) -> None:
        """Keep a host running until cancelled; when this is left, however, there is none any more.

        Returns when the load is given up. Raises EngineUnusableError when trying again is pointless.
        """
        await self._keeper.supervise()

    # ---- what the host says -----------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        self._now = step.counters
        self._stepped.set()
        self._stepped = asyncio.Event()
        self._of_prompts(step)
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

    def _of_prompts(self, step: Step) -> None:
        for progress in step.progress:
            ticket = self._tickets.get(progress.request)
            if ticket is not None:
                ticket.sink.progress(progress)
        for reading in step.readings:
            ticket = self._tickets.get(reading.request)
            if ticket is not None:
                ticket.sink.reading(reading)

    def _bury(self, why: str) -> None:
        """Account for a host that is gone: its requests fail, its counters stay."""
        self.past, self._now = add_counters(self.past, self._now), Counters()
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            _end(ticket, _failed(f"the engine failed while it worked on this request: {why}; it starts again"))


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
        "model_drafted",
        "model_accepted",
        "model_calls_saved",
        "draft_calls",
    )
    sums = {name: getattr(past, name) + getattr(now, name) for name in totals}
    return msgspec.structs.replace(now, **sums)
