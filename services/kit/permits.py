"""Permits for engine services: one session with admission that carries every ask of the process.

    async with PermitClient(channel, service="llm", session_id=..., owner=owner) as permits:
        async with permits.permit(modality="llm", tier="paid", principal="alice", request_id="r1"):
            ...  # the device may be used here

A permit lasts as long as its block, however it is left. When admission is gone, running work goes on: the session
reconnects and brings along what it holds; whoever waits claims the old place in the line. Only who finds nobody to ask
for `patience_s` is refused with `admission_unavailable`.

Who must load a model first steps out of the line meanwhile, so that a cold model blocks nobody:

    async with permits.ask(...) as asking:
        if await asking.park():
            ...  # load, under a permit of the loader's own
            asking.ready()
        permit = await asking.granted()
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Self

import grpc.aio

from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc
from services.kit import telemetry
from services.kit.asking import Asking, OnQueued, Permit
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.owner import Owner
from services.kit.processes import own_identity

__all__ = ["Asking", "Permit", "PermitClient", "identity_in"]

FIRST_BACKOFF_S: Final = 0.05
MOST_BACKOFF_S: Final = 1.0
GOODBYE_S: Final = 1.0
"""How long admission may take to hear that the session is over before the connection is simply dropped."""

_TIERS: Final = {
    "background": pb.TIER_BACKGROUND,
    "free": pb.TIER_FREE,
    "sub": pb.TIER_SUB,
    "paid": pb.TIER_PAID,
}

_log = telemetry.logger(__name__)


def identity_in(session_id: str) -> str:
    """Return the identity (see processes.py) of the process whose PermitClient uses a session id, or ""."""
    return session_id.rpartition("@")[2] if "@" in session_id else ""


class PermitClient:
    """The process's session with admission. Use as a context manager; `owner` runs its one task.

    `session_id`: unique for this process, the same over reconnects; the process's identity is added to it, so that
    admission knows when it is dead. `patience_s`: how long an ask waits for a connection before it is refused.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, service: str, session_id: str, owner: Owner, patience_s: float = 30.0
    ) -> None:
        self._stub = admission_pb2_grpc.AdmissionServiceStub(channel)
        self._service = service
        self._session_id = f"{session_id}@{own_identity()}"
        self._owner = owner
        self._patience_s = patience_s
        self._asking: dict[int, Asking] = {}
        self._last_ask = 0
        self._outgoing: asyncio.Queue[pb.SessionRequest | None] | None = None
        self._connected = asyncio.Event()
        self._loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = self._owner.start(self._stay_connected(), name="session with admission")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        if self._task is None:
            return
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
            await asyncio.wait([self._task], timeout=GOODBYE_S)
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
        pool: str | None = None,
        on_queued: OnQueued | None = None,
    ) -> AsyncIterator[Permit]:
        """Wait for a permit and hold it for the length of the block; arguments and errors as for `ask`."""
        async with self.ask(
            modality=modality,
            tier=tier,
            principal=principal,
            request_id=request_id,
            may_wait=may_wait,
            wait_ms=wait_ms,
            units=units,
            pool=pool,
            on_queued=on_queued,
        ) as asking:
            yield await asking.granted()

    @asynccontextmanager
    async def ask(
        self,
        *,
        modality: str,
        tier: str,
        principal: str,
        request_id: str,
        may_wait: bool = True,
        wait_ms: int | None = None,
        units: int | None = None,
        pool: str | None = None,
        on_queued: OnQueued | None = None,
    ) -> AsyncIterator[Asking]:
        """Ask for a permit; leaving the block gives it back or withdraws the ask.

        `modality`: a name of the contract's enum without its prefix, any case ("llm", "image"). `may_wait` False refuses
        at once instead of waiting. `wait_ms`, `units`, `pool`: admission's defaults when None. Asking.granted raises
        DomainError with admission's reason (queue_full, admission_timeout, saturated, draining, no_capacity,
        invalid_request) or `admission_unavailable`. Cancelling it while it waits withdraws the ask.
        """
        ask = pb.Ask(
            modality=pb.Modality.Value(f"MODALITY_{modality.upper()}"),
            tier=_TIERS[tier],
            mode=pb.MODE_WAIT if may_wait else pb.MODE_TRY,
            principal=principal,
            request_id=request_id,
            units=units,
            wait_ms=wait_ms,
            pool=pool,
            traceparent=telemetry.current_traceparent(),
        )
        self._last_ask += 1
        asking = self._asking[self._last_ask] = Asking(self._last_ask, ask, on_queued, send=self._send, wait=self._wait)
        try:
            asking.introduce()
            yield asking
        finally:
            del self._asking[asking.ask_id]
            if asking.held or not asking.answer.done():
                self._send(pb.SessionRequest(release=pb.SessionRelease(ask_id=asking.ask_id)))

    async def _wait(self, future: asyncio.Future[Any]) -> None:
        """Wait until a future is done; without a connection only for as long as patience lasts."""
        while not future.done():
            if self._connected.is_set():
                either: set[asyncio.Future[Any]] = {future, self._loss}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._connected.wait()
            except TimeoutError:
                message = f"admission has not answered for {self._patience_s:g} s"
                raise DomainError(Reason.ADMISSION_UNAVAILABLE, message, retry_after_ms=1_000) from None

    # ---- the session ----------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closing:
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
        requests: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        requests.put_nowait(pb.SessionRequest(open=self._opening()))

        async def outgoing() -> AsyncIterator[pb.SessionRequest]:
            while (request := await requests.get()) is not None:
                yield request

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
        held = [asking.as_held() for asking in self._asking.values() if asking.held]
        return pb.SessionOpen(session_id=self._session_id, service=self._service, resume=held)

    def _resume(self, outgoing: "asyncio.Queue[pb.SessionRequest | None]", brought: set[int]) -> None:
        """Say what has changed since the session was opened: new asks, old ones that still wait, permits given back."""
        self._outgoing = outgoing
        for ask_id in sorted(brought - self._asking.keys()):
            self._send(pb.SessionRequest(release=pb.SessionRelease(ask_id=ask_id)))
        for asking in self._asking.values():
            asking.introduce()
        self._loss = asyncio.get_running_loop().create_future()
        self._connected.set()

    def _lose(self) -> None:
        self._outgoing = None
        if self._connected.is_set():
            self._connected.clear()
            self._loss.set_result(None)

    def _send(self, request: pb.SessionRequest) -> None:
        """Send, or drop it when nobody listens: opening the next session says everything again."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(request)

    def _deliver(self, event: pb.SessionEvent) -> None:
        asking = self._asking.get(event.ask_id)
        if asking is not None:  # else it was withdrawn, and its release is on the way
            asking.deliver(event)
