"""Short calls to the services behind the facade: models, tokens, health and status."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from facade.door import Principal
from facade.translate.failures import OWN_NAMES, Names, as_rest
from facade.translate.memory import public_state
from facade.translate.models import find_model
from facade.translate.orders import as_order
from facade.translate.state import plain, troubles
from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.diffusion.v1 import diffusion_pb2, diffusion_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from omniserve.vram.v1 import vram_pb2, vram_pb2_grpc
from services.kit.channels import call_metadata
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason, from_rpc_error

M = TypeVar("M", bound=Message)
R = TypeVar("R")

# How long the catalogue is believed for naming the model of an answer; it decides nothing.
_NAMES_FOR_S: Final = 10.0
_NAMES_LIMIT_S: Final = 1.0
# Services whose engines may be in trouble while they themselves serve.
_ENGINES: Final = frozenset({"diffusion", "llm"})


async def told(call: Awaitable[R], *, peer: str, limit_s: float | None, names: Names = OWN_NAMES) -> R:
    """Return the answer of a short call; failures become errors that say nothing about addresses inside the mesh."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        found = failure_of(error, peer=peer, limit_s=limit_s)
    raise as_rest(found, names)


def failure_of(error: grpc.aio.AioRpcError, *, peer: str, limit_s: float | None) -> DomainError:
    """Return why a call failed, with the contract's field names and without addresses inside the mesh."""
    found = from_rpc_error(error, unavailable=Reason.UPSTREAM_FAILED)
    if found.reason is Reason.UPSTREAM_FAILED:
        return DomainError(Reason.LOADING, f"{peer} cannot be reached; it may be starting.")
    # Without a limit it is the peer's own words, and with ours too where it has told a request id.
    if found.reason is Reason.UPSTREAM_TIMEOUT and limit_s is not None and "request_id" not in found.metadata:
        return DomainError(Reason.UPSTREAM_TIMEOUT, f"{peer} did not answer within {limit_s:g} s.")
    return found


@dataclass(frozen=True, slots=True)
class Peer:
    """A service as short calls reach it. `wait_s`: for a connection, since it may be restarting."""

    name: str
    channel: grpc.aio.Channel
    wait_s: float

    async def ready(self, wait_s: float) -> None:
        """Wait for a connection. Raises DomainError loading when there is none in time."""
        try:
            async with asyncio.timeout(wait_s):
                await self.channel.channel_ready()
        except TimeoutError:
            raise DomainError(Reason.LOADING, f"{self.name} cannot be reached; waited {wait_s:g} s for it.") from None

    async def ask(
        self,
        call: Callable[..., Awaitable[R]],
        request: Message,
        who: Principal,
        *,
        limit_s: float | None,
        wait_s: float | None = None,
        names: Names = OWN_NAMES,
    ) -> R:
        """Make a call on behalf of a caller. `wait_s`: instead of the peer's. Raises DomainError."""
        await self.ready(self.wait_s if wait_s is None else wait_s)
        metadata = call_metadata(client=who.client, tier=who.tier, request_id=who.request_id)
        answer = call(request, timeout=limit_s, metadata=metadata)
        return await told(answer, peer=self.name, limit_s=limit_s, names=names)


class LlmCalls:
    """The unary calls to llm on behalf of callers.

    `wait_s`: for a connection. `orders_limit_s`: for the operator's, which wait for loads.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        clock: Clock,
        *,
        limit_s: float,
        wait_s: float,
        orders_limit_s: float = 900.0,
    ) -> None:
        self._peer = Peer("llm", channel, wait_s)
        self._stub: Any = llm_pb2_grpc.LlmServiceStub(channel)
        self._admin: Any = llm_pb2_grpc.LlmAdminServiceStub(channel)
        self._orders_limit_s = orders_limit_s
        self._clock = clock
        self._limit_s = limit_s
        self._models: tuple[llm_pb2.Model, ...] = ()
        self._models_until = float("-inf")

    async def models(self, principal: Principal) -> llm_pb2.ListModelsResponse:
        """Return the catalogue. Raises DomainError."""
        return await self._ask(self._stub.ListModels, llm_pb2.ListModelsRequest(), principal, self._limit_s)

    async def tokenize(
        self, request: llm_pb2.TokenizeRequest, principal: Principal, names: Names = OWN_NAMES
    ) -> llm_pb2.TokenizeResponse:
        """Return the tokens of a text or chat; errors use `names`. Raises DomainError."""
        return await self._ask(self._stub.Tokenize, request, principal, self._limit_s, names)

    async def detokenize(self, request: llm_pb2.DetokenizeRequest, principal: Principal) -> llm_pb2.DetokenizeResponse:
        """Return the text of tokens. Raises DomainError."""
        return await self._ask(self._stub.Detokenize, request, principal, self._limit_s)

    async def embed(self, request: llm_pb2.EmbedRequest, principal: Principal) -> llm_pb2.EmbedResponse:
        """Return vectors. Waits as long as admission lets it. Raises DomainError."""
        return await self._ask(self._stub.Embed, request, principal, None)

    async def rerank(self, request: llm_pb2.RerankRequest, principal: Principal) -> llm_pb2.RerankResponse:
        """Return scores. Waits as long as admission lets it. Raises DomainError."""
        return await self._ask(self._stub.Rerank, request, principal, None)

    async def load(self, request: llm_pb2.LoadModelRequest, principal: Principal) -> llm_pb2.Model:
        """Return the model, loaded. Raises DomainError."""
        answer: llm_pb2.LoadModelResponse = await self._order(self._admin.LoadModel, request, principal)
        return answer.model

    async def unload(self, request: llm_pb2.UnloadModelRequest, principal: Principal) -> llm_pb2.Model:
        """Return the model, out of memory. Raises DomainError."""
        answer: llm_pb2.UnloadModelResponse = await self._order(self._admin.UnloadModel, request, principal)
        return answer.model

    async def swap(self, request: llm_pb2.SwapModelRequest, principal: Principal) -> llm_pb2.Model:
        """Return the model that serves by default then. Raises DomainError."""
        answer: llm_pb2.SwapModelResponse = await self._order(self._admin.SwapModel, request, principal)
        return answer.model

    async def _order(self, call: Callable[..., Awaitable[R]], request: Message, who: Principal) -> R:
        try:
            return await self._ask(call, request, who, self._orders_limit_s)
        except DomainError as error:
            raise as_order(error) from None

    async def name_of(self, asked: str, principal: Principal) -> str:
        """Return the catalogue's name of the model asked for, "" being the default; the name as asked when it is unknown."""
        model = find_model(await self.catalogue(principal), asked)
        return model.name if model is not None else asked

    async def catalogue(self, principal: Principal) -> tuple[llm_pb2.Model, ...]:
        """Return the models as known a short while ago; none when llm cannot tell, which a generation then finds out."""
        if self._clock.monotonic() >= self._models_until:
            try:
                listed = await self._ask(
                    self._stub.ListModels, llm_pb2.ListModelsRequest(), principal, min(_NAMES_LIMIT_S, self._limit_s)
                )
            except DomainError:
                pass  # the generation itself will tell what is wrong
            else:
                self._models = tuple(listed.models)
                self._models_until = self._clock.monotonic() + _NAMES_FOR_S
        return self._models

    async def _ask(
        self,
        call: Callable[..., Awaitable[R]],
        request: Message,
        who: Principal,
        limit_s: float | None,
        names: Names = OWN_NAMES,
    ) -> R:
        wait_s = self._peer.wait_s if limit_s is None else min(self._peer.wait_s, limit_s)
        return await self._peer.ask(call, request, who, limit_s=limit_s, wait_s=wait_s, names=names)


@dataclass(frozen=True, slots=True)
class Health:
    """How one service is: serving, degraded, not_serving or unreachable; `detail` says why, where that is known."""

    status: str
    detail: str = ""


@dataclass(slots=True)
class _Known:
    status: dict[str, Any]
    at: float


class Peers:
    """Health and status of every service, by name."""

    def __init__(
        self, channels: Mapping[str, grpc.aio.Channel], clock: Clock, *, health_limit_s: float, status_budget_s: float
    ) -> None:
        self._health: dict[str, Any] = {name: health_pb2_grpc.HealthStub(each) for name, each in channels.items()}
        self._status: dict[str, Callable[[float], Awaitable[Message]]] = {
            "admission": _status_of(admission_pb2_grpc.AdmissionServiceStub, admission_pb2, channels["admission"]),
            "diffusion": _status_of(diffusion_pb2_grpc.DiffusionServiceStub, diffusion_pb2, channels["diffusion"]),
            "llm": _status_of(llm_pb2_grpc.LlmServiceStub, llm_pb2, channels["llm"]),
            "vram": _state_of_vram(channels["vram"]),
        }
        self._clock = clock
        self._health_limit_s = health_limit_s
        self._status_budget_s = status_budget_s
        self._known: dict[str, _Known] = {}

    async def health(self) -> dict[str, Health]:
        """Return how each service is."""
        return await _all({name: self._health_of(name) for name in self._health})

    async def _health_of(self, name: str) -> Health:
        try:
            answer = await self._health[name].Check(health_pb2.HealthCheckRequest(), timeout=self._health_limit_s)
        except grpc.aio.AioRpcError:
            return Health("unreachable")
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            return Health("not_serving")
        found = await self._troubles_of(name) if name in _ENGINES else []
        return Health("degraded", "; ".join(found)) if found else Health("serving")

    async def _troubles_of(self, name: str) -> list[str]:
        """Return what a service itself says is wrong although it serves, such as weights on the CPU against the settings."""
        try:
            status = await self._status[name](self._health_limit_s)
        except grpc.aio.AioRpcError:
            return ["it serves, but does not tell its status"]
        assert isinstance(status, llm_pb2.GetStatusResponse | diffusion_pb2.GetStatusResponse)  # noqa: S101 - the stubs' answers
        return troubles(status)

    async def status(self) -> dict[str, dict[str, Any]]:
        """Return each service's status as JSON within the budget: fresh, or the last one known marked `stale`."""
        return await _all({name: self._status_now(name) for name in self._status})

    async def _status_now(self, name: str) -> dict[str, Any]:
        try:
            call = self._status[name](self._status_budget_s)
            message = await told(call, peer=name, limit_s=self._status_budget_s)
        except DomainError as error:
            known = self._known.get(name)
            stale = {"stale": True, "error": {"reason": error.reason.value, "message": error.message}}
            return (
                stale
                if known is None
                else known.status | stale | {"age_s": round(self._clock.monotonic() - known.at, 1)}
            )
        shown = public_state(message) if isinstance(message, vram_pb2.GetStateResponse) else plain(message)
        status = shown | {"stale": False}
        self._known[name] = _Known(status, self._clock.monotonic())
        return status


def _status_of(stub_class: Any, messages: Any, channel: grpc.aio.Channel) -> Callable[[float], Awaitable[Message]]:  # noqa: ANN401
    call = stub_class(channel).GetStatus

    def ask(limit_s: float) -> Awaitable[Message]:
        answer: Awaitable[Message] = call(messages.GetStatusRequest(), timeout=limit_s)
        return answer

    return ask


def _state_of_vram(channel: grpc.aio.Channel) -> Callable[[float], Awaitable[Message]]:
    stub: Any = vram_pb2_grpc.VramServiceStub(channel)
    return lambda limit_s: stub.GetState(vram_pb2.GetStateRequest(), timeout=limit_s)


async def _all(waits: Mapping[str, Any]) -> dict[str, Any]:
    async with asyncio.TaskGroup() as tasks:
        running = {name: tasks.create_task(wait) for name, wait in waits.items()}
    return {name: task.result() for name, task in running.items()}
