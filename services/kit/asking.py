"""One ask within a session with admission: what permits.py hands out."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from omniserve.admission.v1 import admission_pb2 as pb
from services.kit.errors import DomainError, Reason

OnQueued = Callable[[int, int | None], None]
"""Told the place in the line (1 is next) and the expected wait in milliseconds, None while it is unknown."""

_REASONS: Final = {reason.value: reason for reason in Reason}


@dataclass(slots=True)
class Permit:
    """A permit that is held. `yield_requested` is set when somebody better waits and this one is background."""

    permit_id: str = ""
    pool: str = ""
    units: int = 0
    waited_ms: int = 0
    yield_requested: asyncio.Event = field(default_factory=asyncio.Event)


class Asking:
    """An ask in progress: it waits, is parked, or its permit is held. Made by PermitClient.ask."""

    def __init__(
        self,
        ask_id: int,
        ask: pb.Ask,
        on_queued: OnQueued | None,
        *,
        send: Callable[[pb.SessionRequest], None],
        wait: Callable[["Asking"], Awaitable[Permit]],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ask_id = ask_id
        self.permit = Permit()
        self.held = False
        self.parked = False
        self.answer: asyncio.Future[Permit | DomainError] = loop.create_future()
        self._send = send
        self._wait = wait
        self._ask = ask
        self._on_queued = on_queued
        self._now = loop.time
        self._ends_at = loop.time() + ask.wait_ms / 1000 if ask.HasField("wait_ms") else None

    def park(self) -> None:
        """Step out of the line and keep the place. A grant that is on its way already stands: see `held`."""
        if not self.held and not self.parked:
            self.parked = True
            self._send(pb.SessionRequest(park=pb.SessionPark(ask_id=self.ask_id)))

    def ready(self) -> None:
        """Step back into the line at the old place."""
        if self.parked:
            self.parked = False
            self._send(pb.SessionRequest(ready=pb.SessionReady(ask_id=self.ask_id)))

    async def granted(self) -> Permit:
        """Wait for the permit. Raises DomainError with admission's reason or `admission_unavailable`."""
        return await self._wait(self)

    def requests(self) -> list[pb.SessionRequest]:
        """Return what tells admission of this ask, with the wait that is left of the one asked for."""
        ask = pb.Ask()
        ask.CopyFrom(self._ask)
        if self._ends_at is not None:
            ask.wait_ms = max(0, round((self._ends_at - self._now()) * 1000))
        requests = [pb.SessionRequest(ask=pb.SessionAsk(ask_id=self.ask_id, ask=ask))]
        if self.parked:
            requests.append(pb.SessionRequest(park=pb.SessionPark(ask_id=self.ask_id)))
        return requests

    def as_held(self) -> pb.HeldPermit:
        """Return what a reconnecting session brings along."""
        permit = self.permit
        return pb.HeldPermit(ask_id=self.ask_id, permit_id=permit.permit_id, ask=self._ask, units=permit.units)

    def deliver(self, event: pb.SessionEvent) -> None:
        """Take one event of admission."""
        match event.WhichOneof("event"):
            case "queued":
                if self._on_queued is not None:
                    eta_ms = event.queued.eta_ms if event.queued.HasField("eta_ms") else None
                    self._on_queued(event.queued.position, eta_ms)
            case "granted":
                if not self.answer.done():
                    granted, permit = event.granted, self.permit
                    permit.permit_id, permit.pool = granted.permit_id, granted.pool
                    permit.units, permit.waited_ms = granted.units, granted.waited_ms
                    self.held = True
                    self.answer.set_result(permit)
            case "yield_requested":
                self.permit.yield_requested.set()
            case "rejected":
                if not self.answer.done():
                    self.answer.set_result(_refusal(event.rejected))
            case None:
                pass


def _refusal(rejected: pb.Rejected) -> DomainError:
    reason = _REASONS.get(rejected.reason, Reason.ADMISSION_UNAVAILABLE)
    retry_after_ms = rejected.retry_after_ms if rejected.HasField("retry_after_ms") else None
    return DomainError(reason, rejected.message, retry_after_ms=retry_after_ms)
