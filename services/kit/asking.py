"""One ask within a session with admission: what permits.py hands out."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

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
    """An ask in progress: it waits, is parked, or its permit is held. Made by PermitClient.ask.

    `wait` waits for a future as long as admission can be reached.
    """

    def __init__(
        self,
        ask_id: int,
        ask: pb.Ask,
        on_queued: OnQueued | None,
        *,
        send: Callable[[pb.SessionRequest], None],
        wait: Callable[[asyncio.Future[Any]], Awaitable[None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ask_id = ask_id
        self.permit = Permit()
        self.held = False
        self.parked = False
        self.answer: asyncio.Future[Permit | DomainError] = loop.create_future()
        self._parking: asyncio.Future[None] = loop.create_future()
        self._is_known = True
        self._send = send
        self._wait = wait
        self._ask = ask
        self._on_queued = on_queued
        self._now = loop.time
        self._ends_at = loop.time() + ask.wait_ms / 1000 if ask.HasField("wait_ms") else None

    async def park(self) -> bool:
        """Step out of the line and keep the place; return False when an answer came first: see `held`.

        A place is lost when admission itself restarts meanwhile. Raises DomainError `admission_unavailable`.
        """
        if not self.parked and not self.answer.done():
            self.parked = True
            self._parking = asyncio.get_running_loop().create_future()
            self._send(pb.SessionRequest(park=pb.SessionPark(ask_id=self.ask_id)))
            await self._wait(self._parking)
        return self.parked

    def ready(self) -> None:
        """Step back into the line at the old place."""
        if not self.parked:
            return
        self.parked = False
        if self._is_known:
            self._send(pb.SessionRequest(ready=pb.SessionReady(ask_id=self.ask_id)))
        else:
            self.introduce()

    async def granted(self) -> Permit:
        """Wait for the permit. Raises DomainError with admission's reason or `admission_unavailable`."""
        await self._wait(self.answer)
        answer = self.answer.result()
        if isinstance(answer, DomainError):
            raise answer
        return answer

    def introduce(self) -> None:
        """Tell a connection that does not know it of the ask, with what is left of its wait.

        A parked ask is not told of before it is ready: it might be granted before admission reads that it is parked.
        """
        if self.answer.done():
            return
        self._is_known = not self.parked
        if self.parked:
            self._is_parked()
            return
        ask = pb.Ask()
        ask.CopyFrom(self._ask)
        if self._ends_at is not None:
            ask.wait_ms = max(0, round((self._ends_at - self._now()) * 1000))
        self._send(pb.SessionRequest(ask=pb.SessionAsk(ask_id=self.ask_id, ask=ask)))

    def as_held(self) -> pb.HeldPermit:
        """Return what a reconnecting session brings along."""
        permit = self.permit
        return pb.HeldPermit(ask_id=self.ask_id, permit_id=permit.permit_id, ask=self._ask, units=permit.units)

    def deliver(self, event: pb.SessionEvent) -> None:
        """Take one event of admission."""
        match event.WhichOneof("event"):
            case "queued" if event.queued.position == 0:
                self._is_parked()
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
                    self._end(permit)
            case "yield_requested":
                self.permit.yield_requested.set()
            case "rejected":
                if not self.answer.done():
                    self._end(_refusal(event.rejected))
            case None:
                pass

    def _end(self, answer: Permit | DomainError) -> None:
        self.parked = False
        self.answer.set_result(answer)
        self._is_parked()

    def _is_parked(self) -> None:
        if not self._parking.done():
            self._parking.set_result(None)


def _refusal(rejected: pb.Rejected) -> DomainError:
    reason = _REASONS.get(rejected.reason, Reason.ADMISSION_UNAVAILABLE)
    retry_after_ms = rejected.retry_after_ms if rejected.HasField("retry_after_ms") else None
    return DomainError(reason, rejected.message, retry_after_ms=retry_after_ms)
