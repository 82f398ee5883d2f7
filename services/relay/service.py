"""The gRPC servicers: messages in, calls of the owners, messages out. They decide nothing."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc.aio
from typing_extensions import override

from omniserve.relay.v1 import relay_pb2 as pb
from omniserve.relay.v1 import relay_pb2_grpc
from services.kit import config
from services.kit.access import caller_of
from services.kit.clock import Clock
from services.kit.config import ConfigError, Fault
from services.kit.errors import DomainError, Reason
from services.kit.keyring import KeyringError
from services.relay import translate
from services.relay.adapters.envoy_stats import EnvoyStats
from services.relay.adapters.forward import Answer, Forwarder
from services.relay.adapters.judge import EnvoyVersion, JudgeError
from services.relay.control import Control
from services.relay.core.forwarding import PIECE_BYTES, Outgoing, outgoing, principal_of
from services.relay.core.model import GroupKind, RelayInputs
from services.relay.core.planning import PlannedRoute
from services.relay.core.stats import UpstreamCounts
from services.relay.inputs import assemble
from services.relay.live import LiveEndpoints
from services.relay.settings import RelaySettings

SERVICES: Final = ("omniserve.relay.v1.RelayService", "omniserve.relay.v1.RelayAdminService")
_TOLD_EVERY_S: Final = 10.0
_LOOKED_EVERY_S: Final = 0.1

Context = grpc.aio.ServicerContext[Any, Any]


class RelayServicer(relay_pb2_grpc.RelayServiceServicer):
    """omniserve.relay.v1.RelayService."""

    def __init__(
        self,
        control: Control,
        live: LiveEndpoints,
        stats: EnvoyStats,
        forwarder: Forwarder,
        clock: Clock,
        *,
        default_ttl_s: int,
        envoy_version: EnvoyVersion,
        told_every_s: float = _TOLD_EVERY_S,
    ) -> None:
        self._control = control
        self._live = live
        self._stats = stats
        self._forwarder = forwarder
        self._clock = clock
        self._default_ttl_s = default_ttl_s
        self._envoy_version = envoy_version
        self._told_every_s = told_every_s
        self._draining = False

    def drain(self) -> None:
        """Take no more endpoints: they would end with this process's successor."""
        self._draining = True

    # ---- what there is --------------------------------------------------------------------------------------------

    @override
    async def ListUpstreams(self, request: pb.ListUpstreamsRequest, context: Context) -> pb.ListUpstreamsResponse:
        """See the contract."""
        counts = (await self._stats.read()).stats.upstreams
        found = self._live.applied(self._control.state.inputs).upstreams.values()
        configured = [each for each in found if any(group.endpoints for group in each.groups)]
        return pb.ListUpstreamsResponse(
            upstreams=[
                translate.upstream(each, counts.get(each.name)) for each in sorted(configured, key=lambda e: e.name)
            ]
        )

    @override
    async def ListRoutes(self, request: pb.ListRoutesRequest, context: Context) -> pb.ListRoutesResponse:
        """See the contract."""
        routes = [translate.route(each) for each in self._control.state.rendered.plan]
        wanted = [each for each in routes if not request.target or each.target == request.target]
        return pb.ListRoutesResponse(routes=sorted(wanted, key=lambda each: (each.path, each.method)))

    @override
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """See the contract."""
        state = self._control.state
        reading = await self._stats.read()
        age_s = None if reading.at is None else self._clock.monotonic() - reading.at
        upstreams = self._live.applied(state.inputs).upstreams
        return pb.GetStatusResponse(
            config_version=state.rendered.version,
            config_applied_unix_ms=state.applied_unix_ms,
            problems=[translate.problem(each) for each in state.problems],
            envoy_reachable=reading.reachable,
            envoy_version=await self._envoy_version.read(),
            stats_age_ms=None if age_s is None else round(age_s * 1000),
            upstreams=translate.statuses(upstreams, state.rendered.plan, reading.stats),
            draining=reading.stats.draining,
            active_requests=reading.stats.active,
        )

    # ---- live endpoints -------------------------------------------------------------------------------------------

    @override
    async def SetEndpoints(self, request: pb.SetEndpointsRequest, context: Context) -> pb.SetEndpointsResponse:
        """See the contract."""
        if self._draining:
            raise DomainError(Reason.DRAINING, "relay is shutting down", retry_after_ms=1_000)
        change = translate.change(request, caller_of(context).service, self._default_ttl_s)
        await self._live.set_endpoints(self._control, change)
        return pb.SetEndpointsResponse(config_version=self._control.state.rendered.version, ttl_s=change.ttl_s)

    # ---- Forward --------------------------------------------------------------------------------------------------

    @override
    async def Forward(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ForwardRequest], context: Context
    ) -> None:
        """See the contract. However the stream ends, the exchange is over when this returns."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or not first.HasField("head"):
            raise DomainError(Reason.INVALID_REQUEST, "the first message must be 'head'", field="head")
        planned = self._planned(first.head.route_id)
        request = _outgoing(planned, first.head)
        caller = caller_of(context)
        client = principal_of(first.head.principal, caller.client, is_believed=caller.speaks_for_clients)
        request_id = first.head.request_id or uuid.uuid4().hex
        tier = translate.tier_name(first.head.tier) or caller.tier
        answered = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(self._tell_waiting(answered, context))
            async with self._forwarder.exchange(
                request, _body(requests), client=client, tier=tier, request_id=request_id
            ) as answer:
                answered.set()
                await waiting
                await _pass_on(answer, planned, context)

    def _planned(self, route_id: str) -> PlannedRoute:
        for each in self._control.state.rendered.plan:
            if each.spec.route_id == route_id:
                return each
        known = [each.spec.route_id for each in self._control.state.rendered.plan]
        near = config.nearest(route_id, known)
        hint = f"; did you mean {near}?" if near else ""
        raise DomainError(Reason.NOT_FOUND, f"there is no route {route_id[:80]!r}{hint}", field="head.route_id")

    async def _tell_waiting(self, answered: asyncio.Event, context: Context) -> None:
        """Say every while that nothing has come yet; never while something else is being written."""
        began = self._clock.monotonic()
        while not answered.is_set():
            try:
                async with asyncio.timeout(self._told_every_s):
                    await answered.wait()
            except TimeoutError:
                waited_ms = round((self._clock.monotonic() - began) * 1000)
                await context.write(pb.ForwardResponse(queued=pb.ForwardQueued(waited_ms=waited_ms)))


def _outgoing(planned: PlannedRoute, head: pb.ForwardHead) -> Outgoing:
    return outgoing(
        planned,
        query=head.query,
        path_rest=head.path_rest,
        headers=[(each.name, each.value) for each in head.headers],
        body_bytes=head.body_bytes if head.HasField("body_bytes") else None,
        may_wait=head.may_wait or not head.HasField("may_wait"),
    )


async def _body(requests: AsyncIterator[pb.ForwardRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if not request.HasField("body"):
            raise DomainError(Reason.INVALID_REQUEST, "'head' comes once, at first", field="head")
        if len(request.body) > PIECE_BYTES:
            message = f"a piece has {len(request.body)} bytes; the most is {PIECE_BYTES}"
            raise DomainError(Reason.INVALID_REQUEST, message, field="body")
        yield request.body


async def _pass_on(answer: Answer, planned: PlannedRoute, context: Context) -> None:
    backing = planned.proxied
    fallback = backing.fallbacks[0].kind if backing.fallbacks else backing.main.kind
    kind = fallback if answer.backend == "managed" and backing.main.kind is GroupKind.LOCAL else backing.main.kind
    head = pb.ForwardAnswer(
        status=answer.status,
        headers=[pb.Header(name=name, value=value) for name, value in answer.headers],
        group=translate.KINDS[kind],
        attempts=answer.attempts,
    )
    await context.write(pb.ForwardResponse(head=head))
    total = 0
    async for piece in answer.body:
        for start in range(0, len(piece), PIECE_BYTES):
            await context.write(pb.ForwardResponse(body=piece[start : start + PIECE_BYTES]))
        total += len(piece)
    await context.write(pb.ForwardResponse(end=pb.ForwardEnd(body_bytes=total)))


class RelayAdminServicer(relay_pb2_grpc.RelayAdminServiceServicer):
    """omniserve.relay.v1.RelayAdminService. `environ` has the credentials that settings name."""

    def __init__(
        self,
        control: Control,
        live: LiveEndpoints,
        stats: EnvoyStats,
        settings: RelaySettings,
        clock: Clock,
        *,
        environ: Mapping[str, str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._control = control
        self._live = live
        self._stats = stats
        self._settings = settings
        self._clock = clock
        self._environ = environ
        self._sleep = sleep

    @override
    async def ReloadConfig(self, request: pb.ReloadConfigRequest, context: Context) -> pb.ReloadConfigResponse:
        """See the contract."""
        before = self._control.state.rendered.version
        state = await self._control.refresh()
        if state.problems:
            first = state.problems[0]
            raise DomainError(
                Reason.INVALID_REQUEST, "; ".join(str(each) for each in state.problems), field=first.setting or None
            )
        return pb.ReloadConfigResponse(config_version=state.rendered.version, changed=state.rendered.version != before)

    @override
    async def CheckConfig(self, request: pb.CheckConfigRequest, context: Context) -> pb.CheckConfigResponse:
        """See the contract."""
        faults = await self._faults(request.yaml if request.HasField("yaml") else None)
        return pb.CheckConfigResponse(problems=[translate.problem(each) for each in faults])

    async def _faults(self, text: str | None) -> tuple[Fault, ...]:
        try:
            inputs = self._control.read() if text is None else self._read(text)
            refused = await self._control.judge(self._control.render(inputs))
        except ConfigError as error:
            return error.faults
        except (JudgeError, KeyringError) as error:
            refused = str(error)
        return () if refused is None else (Fault("", None, "", refused),)

    def _read(self, text: str) -> RelayInputs:
        state = self._control.state
        return assemble(
            self._settings,
            config.parse(text, str(self._settings.config or "omniserve.yaml")),
            environ=self._environ,
            has_keys=state.inputs.authenticate_public,
            route_ids=[each.spec.route_id for each in state.rendered.plan],
        )

    @override
    async def DrainEndpoint(self, request: pb.DrainEndpointRequest, context: Context) -> pb.DrainEndpointResponse:
        """See the contract."""
        name, address = request.upstream, request.address
        await self._live.drain(self._control, name, address, drained=request.drain)
        ends_at = self._clock.monotonic() + request.wait_ms / 1000
        while True:
            active = await self._active(name, address)
            if not request.drain or not active or self._clock.monotonic() >= ends_at:
                return pb.DrainEndpointResponse(active_requests=active)
            await self._sleep(_LOOKED_EVERY_S)

    async def _active(self, name: str, address: str) -> int:
        """Return how many requests run at an endpoint; all of the upstream's where Envoy does not count them apart."""
        counts = (await self._stats.read(fresh=True)).stats.upstreams.get(name, UpstreamCounts())
        for group in self._live.applied(self._control.state.inputs).upstreams[name].groups:
            for each in group.endpoints:
                if each.address == address:
                    found = counts.places.get((group.kind.value, translate.place_of(each)))
                    return counts.active if found is None else found.active
        return 0
