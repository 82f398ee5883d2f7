"""Permits for engine services: one session with admission that carries every ask of the process.

    async with PermitClient(channel, service="llm", session_id=..., owner=owner) as permits:
        async with permits.permit(modality="llm", tier="paid", principal="alice", request_id="r1"):
            ...  # the device may be used here

A permit lasts as long as its block, however it is left. When admission is gone, running work goes on: the session
reconnects and brings along what it holds; whoever waits claims the old place in the line. Only who finds nobody to ask
for `patience_s` is refused with `admission_unavailable`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self

import grpc.aio

from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc
from services.kit import telemetry
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.owner import Owner

__all__ = ["Permit", "PermitClient"]

OnQueued = Callable[[int, int | None], None]
"""Told the place in the line (1 is next) and the expected wait in milliseconds, None while it is unknown."""

FIRST_BACKOFF_S: Final = 0.05
MOST_BACKOFF_S: Final = 1.0

_TIERS: Final = {
    "background": pb.TIER_BACKGROUND,
    "free": pb.TIER_FREE,
    "sub": pb.TIER_SUB,
    "paid": pb.TIER_PAID,
}
_REASONS: Final = {reason.value: reason for reason in Reason}

_log = telemetry.logger(__name__)


@dataclass(slots=True)
class Permit:
    """A permit that is held. `yield_requested` is set when somebody better waits and this one is background."""

    permit_id: str = ""
    pool: str = ""
    units: int = 0
    waited_ms: int = 0
    yield_requested: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Asking:
    """An ask that waits or whose permit is held."""

    ask: pb.Ask
    on_queued: OnQueued | None
    answer: asyncio.Future[Permit | DomainError]
    permit: Permit = field(default_factory=Permit)
    held: bool = False


class PermitClient:
    """The process's session with admission. Use as a context manager; `owner` runs its one task.

    `session_id`: unique for this process, the same over reconnects. `patience_s`: how long an ask waits for a
    connection before it is refused.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, service: str, session_id: str, owner: Owner, patience_s: float = 3.0
    ) -> None:
        self._stub = admission_pb2_grpc.AdmissionServiceStub(channel)
        self._service = service
        self._session_id = session_id
        self._owner = owner
        self._patience_s = patience_s
        self._asking: dict[int, _Asking] = {}
        self._last_ask = 0
        self._outgoing: asyncio.Queue[pb.SessionRequest] | None = None
        self._connected = asyncio.Event()
        self._loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = self._owner.start(self._stay_connected(), name="session with admission")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def connected(self) -> bool:
        """Whether admission can be asked now."""
        return self._connected.is_set()

    @property
    def held(self) -> int:
        """Permits held now."""
        return sum(asking.held for asking in self._asking.values())

    @asynccontextmanager
    async def permit(
        self,
        *,
        modality: str,
        tier: str,
        principal: str,
        request_id: str,
        may_wait: bool = True,
        wait_ms: int | None = None,
        units: int | None = None,
        on_queued: OnQueued | None = None,
    ) -> AsyncIterator[Permit]:
        """Wait for a permit and hold it for the length of the block.

        `modality`: a name of the contract's enum without its prefix, any case ("llm", "image"). `may_wait` False refuses
        at once instead of waiting. Raises DomainError with admission's reason (queue_full, admission_timeout, saturated,
        draining, no_capacity, invalid_request) or `admission_unavailable`. Cancelling it while it waits withdraws the ask.
        """
        ask = pb.Ask(
            modality=pb.Modality.Value(f"MODALITY_{modality.upper()}"),
            tier=_TIERS[tier],
            mode=pb.MODE_WAIT if may_wait else pb.MODE_TRY,
            principal=principal,
            request_id=request_id,
            units=units,
            wait_ms=wait_ms,
        )
        self._last_ask += 1
        ask_id = self._last_ask
        asking = _Asking(ask, on_queued, asyncio.get_running_loop().create_future())
        self._asking[ask_id] = asking
        try:
            self._send_ask(ask_id, ask)
            yield await self._answer(asking)
        finally:
            del self._asking[ask_id]
            if not (asking.answer.done() and not asking.held):
                self._send(pb.SessionRequest(release=pb.SessionRelease(ask_id=ask_id)))

    async def _answer(self, asking: _Asking) -> Permit:
        """Wait for grant or refusal; without a connection only for as long as patience lasts."""
        while not asking.answer.done():
            if self._connected.is_set():
                either: set[asyncio.Future[Any]] = {asking.answer, self._loss}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._connected.wait()
            except TimeoutError:
                message = f"admission has not answered for {self._patience_s:g} s"
                raise DomainError(Reason.ADMISSION_UNAVAILABLE, message, retry_after_ms=1_000) from None
        answer = asking.answer.result()
        if isinstance(answer, DomainError):
            raise answer
        return answer

    # ---- the session ----------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._converse()
                backoff_s = FIRST_BACKOFF_S
            except grpc.aio.AioRpcError as error:
                known = from_rpc_error(error, unavailable=Reason.ADMISSION_UNAVAILABLE)
                if self._outgoing is not None:
                    backoff_s = FIRST_BACKOFF_S  # it was connected: the first retry may be quick
                _log.warning("no session with admission", reason=known.reason.value, error=known.message)
            finally:
                self._lose()
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, MOST_BACKOFF_S)

    async def _converse(self) -> None:
        """Open the session, bring along what is held, and deliver events until the stream ends."""
        requests: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        requests.put_nowait(pb.SessionRequest(open=self._opening()))

        async def outgoing() -> AsyncIterator[pb.SessionRequest]:
            while True:
                yield await requests.get()

        brought = {ask_id for ask_id, asking in self._asking.items() if asking.held}
        call = self._stub.Session(outgoing())
        try:
            async for response in call:
                if response.HasField("opened"):
                    self._resume(requests, brought)
                else:
                    self._deliver(response.event)
        finally:
            call.cancel()

    def _opening(self) -> pb.SessionOpen:
        held = [
            pb.HeldPermit(ask_id=number, permit_id=one.permit.permit_id, ask=one.ask, units=one.permit.units)
            for number, one in self._asking.items()
            if one.held
        ]
        return pb.SessionOpen(session_id=self._session_id, service=self._service, resume=held)

    def _resume(self, requests: "asyncio.Queue[pb.SessionRequest]", brought: set[int]) -> None:
        """Say what has changed since the session was opened: new asks, old ones that still wait, permits given back."""
        self._outgoing = requests
        for ask_id in sorted(brought - self._asking.keys()):
            self._send(pb.SessionRequest(release=pb.SessionRelease(ask_id=ask_id)))
        for ask_id, asking in self._asking.items():
            if not asking.answer.done():
                self._send_ask(ask_id, asking.ask)
        self._loss = asyncio.get_running_loop().create_future()
        self._connected.set()

    def _lose(self) -> None:
        self._outgoing = None
        if self._connected.is_set():
            self._connected.clear()
            self._loss.set_result(None)

    def _send_ask(self, ask_id: int, ask: pb.Ask) -> None:
        self._send(pb.SessionRequest(ask=pb.SessionAsk(ask_id=ask_id, ask=ask)))

    def _send(self, request: pb.SessionRequest) -> None:
        """Send, or drop it when nobody listens: opening the next session says everything again."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(request)

    def _deliver(self, event: pb.SessionEvent) -> None:
        asking = self._asking.get(event.ask_id)
        if asking is None:
            return  # withdrawn meanwhile; its release is on the way
        match event.WhichOneof("event"):
            case "queued":
                if asking.on_queued is not None:
                    eta_ms = event.queued.eta_ms if event.queued.HasField("eta_ms") else None
                    asking.on_queued(event.queued.position, eta_ms)
            case "granted":
                if not asking.answer.done():
                    granted = event.granted
                    permit = asking.permit
                    permit.permit_id, permit.pool = granted.permit_id, granted.pool
                    permit.units, permit.waited_ms = granted.units, granted.waited_ms
                    asking.held = True
                    asking.answer.set_result(permit)
            case "yield_requested":
                asking.permit.yield_requested.set()
            case "rejected":
                if not asking.answer.done():
                    asking.answer.set_result(_refusal(event.rejected))
            case None:
                pass


def _refusal(rejected: pb.Rejected) -> DomainError:
    reason = _REASONS.get(rejected.reason, Reason.ADMISSION_UNAVAILABLE)
    retry_after_ms = rejected.retry_after_ms if rejected.HasField("retry_after_ms") else None
    return DomainError(reason, rejected.message, retry_after_ms=retry_after_ms)
