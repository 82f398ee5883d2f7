"""The gRPC servicers: messages in, calls of the keeper, events out. They decide nothing."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio
from opentelemetry.trace import Span
from typing_extensions import override

from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc
from services.admission import spans, translate
from services.admission.core.desk import Held
from services.admission.core.intake import Intake, InvalidAskError
from services.admission.core.model import Ask, Event, Modality, Refusal, Rejected
from services.admission.core.sessions import DuplicateAskError, SessionConflictError
from services.admission.core.snapshot import free_slots, pressure, view
from services.admission.keeper import Inbox, Keeper
from services.kit import telemetry
from services.kit.access import caller_of
from services.kit.errors import DomainError, Reason

SERVICES: Final = ("omniserve.admission.v1.AdmissionService", "omniserve.admission.v1.AdmissionAdminService")
_DEFAULT_INTERVAL_MS: Final = 1_000
_LEAST_INTERVAL_MS: Final = 50
# How long the end of a session's requests is not believed to be its service's goodbye.
_DOUBT_S: Final = 0.2
_log = telemetry.logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class AdmissionServicer(admission_pb2_grpc.AdmissionServiceServicer):
    """omniserve.admission.v1.AdmissionService."""

    def __init__(self, keeper: Keeper, intake: Intake, *, grace_s: float) -> None:
        self._keeper = keeper
        self._intake = intake
        self._grace_ms = translate.milliseconds(grace_s)

    # ---- single callers -------------------------------------------------------------------------------------------

    @override
    async def Acquire(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.AcquireRequest], context: Context
    ) -> None:
        """See the contract. However the stream ends, the permit is back when this returns."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("ask"):
            raise DomainError(Reason.INVALID_REQUEST, "the first message must be 'ask'", field="ask")
        ask = self._resolve(first.ask)
        span = spans.waiting(first.ask.traceparent or telemetry.current_traceparent(), ask)
        ticket, inbox = self._keeper.ask(ask)
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read_single(ticket, request_iterator, inbox))
            try:
                await self._tell_single(ask, inbox, span, context)
            finally:
                spans.over(span, "withdrawn")
                self._keeper.leave(ticket)  # here, so that the next in line does not wait for this stream's end
                reader.cancel()

    async def _read_single(self, ticket: int, requests: AsyncIterator[pb.AcquireRequest], inbox: Inbox) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "park":
                    self._keeper.park(ticket)
                case "ready":
                    self._keeper.ready(ticket)
                case _:
                    raise DomainError(Reason.INVALID_REQUEST, "'ask' comes once, at first", field="ask")
        self._keeper.leave(ticket)
        inbox.events.put_nowait(None)

    async def _tell_single(self, ask: Ask, inbox: Inbox, span: Span | None, context: Context) -> None:
        async for number, event in inbox.news():
            spans.heard(span, event)
            kind, message = translate.told(event, ask, self._keeper.desk.permit_id(number))
            await context.write(pb.AcquireResponse(**{kind: message}))  # type: ignore[arg-type]
            if isinstance(event, Rejected):
                raise translate.refusal_error(event)

    def _resolve(self, ask: pb.Ask) -> Ask:
        try:
            return self._intake.resolve(translate.wish(ask))
        except InvalidAskError as error:
            raise DomainError(Reason.INVALID_REQUEST, str(error), field=f"ask.{error.field}") from error

    # ---- sessions -------------------------------------------------------------------------------------------------

    @override
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        """See the contract. A stream that its service closes ends the session; one that breaks loses it."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("open") or not first.open.session_id:
            raise DomainError(
                Reason.INVALID_REQUEST, "the first message must be 'open' with a 'session_id'", field="open"
            )
        if self._keeper.draining:
            raise DomainError(Reason.DRAINING, "admission is shutting down", retry_after_ms=1_000)
        conversation = _Conversation(self._keeper, self._intake, first.open.session_id)
        await conversation.open(first.open, caller_of(context).service)
        try:
            opened = pb.SessionOpened(epoch=self._keeper.desk.epoch, session_grace_ms=self._grace_ms)
            await context.write(pb.SessionResponse(opened=opened))
            await conversation.hold(request_iterator, context)
        finally:
            self._keeper.lose_session(first.open.session_id)

    # ---- what is watched ------------------------------------------------------------------------------------------

    @override
    async def WatchPressure(  # type: ignore[override]
        self, request: pb.WatchPressureRequest, context: Context
    ) -> None:
        """See the contract."""
        pools = self._keeper.desk.scheduler.pools
        if unknown := sorted(set(request.pools) - set(pools)):
            message = f"no pool {unknown[0]!r}; there are {', '.join(sorted(pools))}"
            raise DomainError(Reason.INVALID_REQUEST, message, field="pools")
        wanted = set(request.pools) or set(pools)
        interval_s = max(request.min_interval_ms or _DEFAULT_INTERVAL_MS, _LEAST_INTERVAL_MS) / 1000
        last: pb.WatchPressureResponse | None = None
        while not self._keeper.draining:
            changed = self._keeper.next_change()
            report = self._report(wanted)
            if report != last:
                await context.write(report)
                last = report
            await asyncio.sleep(interval_s)
            if not report.pressures:  # while somebody waits, the waits grow without any other change
                await changed.wait()

    def _report(self, wanted: set[str]) -> pb.WatchPressureResponse:
        scheduler = self._keeper.desk.scheduler
        found = [one for one in pressure(scheduler, self._keeper.now()) if one.pool in wanted]
        free = {name: slots for name, slots in free_slots(scheduler).items() if name in wanted}
        return pb.WatchPressureResponse(pressures=translate.pressures(found), free_slots=free)

    @override
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """See the contract."""
        desk, now = self._keeper.desk, self._keeper.now()
        units = {f"MODALITY_{one.name}": self._intake.default_units(one, self._intake.pool_of[one]) for one in Modality}
        return pb.GetStatusResponse(
            pools=[translate.pool_status(one, now) for one in view(desk.scheduler, now)],
            epoch=desk.epoch,
            default_wait_ms=translate.milliseconds(self._intake.wait_s),
            max_queue=desk.scheduler.rules.max_queue,
            draining=self._keeper.draining,
            units_by_modality=units,
        )


class _Conversation:
    """One session's stream."""

    def __init__(self, keeper: Keeper, intake: Intake, session_id: str) -> None:
        self._keeper = keeper
        self._intake = intake
        self._session_id = session_id
        self._inbox = Inbox()
        self._asks: dict[int, Ask] = {}
        self._spans: dict[int, Span] = {}

    async def open(self, opening: pb.SessionOpen, service: str) -> None:
        """Open or resume the session; the caller's token says which service it belongs to."""
        held = []
        for one in opening.resume:
            try:
                ask = self._intake.resolve(translate.held(one))._replace(units=one.units)
            except InvalidAskError as error:  # e.g. a pool that the settings no longer have: there is nothing to count
                _log.warning("a permit from before cannot be counted", permit=one.permit_id, error=str(error))
                continue
            held.append(Held(one.ask_id, one.permit_id, ask))
            self._asks[one.ask_id] = ask
        try:
            self._inbox = self._keeper.open_session(self._session_id, service, held)
        except SessionConflictError as error:
            raise DomainError(Reason.CONFLICT, str(error), field="open.session_id") from error

    async def hold(self, requests: AsyncIterator[pb.SessionRequest], context: Context) -> None:
        """Carry messages both ways until the stream ends."""
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(requests))
            try:
                await self._tell(context)
            finally:
                for span in self._spans.values():
                    spans.over(span, "session lost")
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "ask":
                    self._ask(request.ask)
                case "release":
                    self._asks.pop(request.release.ask_id, None)
                    spans.over(self._spans.pop(request.release.ask_id, None), "withdrawn")
                    self._keeper.session_release(self._session_id, request.release.ask_id)
                case "park":
                    self._keeper.session_park(self._session_id, request.park.ask_id)
                case "ready":
                    self._keeper.session_ready(self._session_id, request.ready.ask_id)
                case _:
                    raise DomainError(Reason.INVALID_REQUEST, "'open' comes once, at first", field="open")
        # gRPC reports a broken stream as an end of requests too, and cancels the handler a moment later.
        await asyncio.sleep(_DOUBT_S)
        self._keeper.end_session(self._session_id)
        self._inbox.events.put_nowait(None)

    def _ask(self, request: pb.SessionAsk) -> None:
        try:
            ask = self._resolve(request.ask)
        except DomainError as error:
            self._inbox.events.put_nowait((request.ask_id, Rejected(0, Refusal.INVALID_REQUEST, error.message, None)))
            return
        try:
            self._asks[request.ask_id] = ask
            if (span := spans.waiting(request.ask.traceparent, ask)) is not None:
                self._spans[request.ask_id] = span
            self._keeper.session_ask(self._session_id, request.ask_id, ask)
        except DuplicateAskError as error:
            raise DomainError(Reason.INVALID_REQUEST, str(error), field="ask.ask_id") from error

    def _resolve(self, ask: pb.Ask) -> Ask:
        try:
            return self._intake.resolve(translate.wish(ask))
        except InvalidAskError as error:
            raise DomainError(Reason.INVALID_REQUEST, str(error), field=f"ask.{error.field}") from error

    async def _tell(self, context: Context) -> None:
        async for ask_id, event in self._inbox.news():
            await context.write(pb.SessionResponse(event=self._event(ask_id, event)))

    def _event(self, ask_id: int, event: Event) -> pb.SessionEvent:
        if self._spans and spans.heard(self._spans.get(ask_id), event):
            self._spans.pop(ask_id, None)
        if isinstance(event, Rejected):
            self._asks.pop(ask_id, None)
            kept = pb.SessionEvent(ask_id=ask_id)
            kept.rejected.CopyFrom(translate.rejected(event.refusal, event.message, event.retry_after_s))
            return kept
        ask = self._asks.get(ask_id)
        if ask is None:  # given back meanwhile: the caller ignores what comes late
            return pb.SessionEvent(ask_id=ask_id)
        kind, message = translate.told(event, ask, self._keeper.desk.permit_id(getattr(event, "ticket", 0)))
        return pb.SessionEvent(ask_id=ask_id, **{kind: message})  # type: ignore[arg-type]


class AdmissionAdminServicer(admission_pb2_grpc.AdmissionAdminServiceServicer):
    """omniserve.admission.v1.AdmissionAdminService."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._numbers = itertools.count(1)

    @override
    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        """See the contract."""
        desk = self._keeper.desk
        hold_id = request.hold_id if request.HasField("hold_id") else f"hold-{desk.epoch}-{next(self._numbers)}"
        excluded = {ticket for one in request.exclude_permits if (ticket := desk.ticket_of(one)) is not None}
        hold = translate.hold(
            request,
            hold_id=hold_id,
            pools=frozenset(desk.scheduler.pools),
            excluded=frozenset(excluded),
            now=self._keeper.now(),
        )
        self._keeper.hold(hold)
        in_flight = await self._keeper.drained(hold, request.wait_ms / 1000)
        return pb.HoldResponse(hold_id=hold_id, drained=not in_flight, in_flight=in_flight)

    @override
    async def ReleaseHold(self, request: pb.ReleaseHoldRequest, context: Context) -> pb.ReleaseHoldResponse:
        """See the contract."""
        holds = self._keeper.desk.memory().holds
        wanted = [one.hold_id for one in holds if not request.HasField("hold_id") or one.hold_id == request.hold_id]
        self._keeper.release_holds(wanted)
        return pb.ReleaseHoldResponse(released=bool(wanted))
