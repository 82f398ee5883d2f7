"""The gRPC server of a service: the same options, checks, health, reflection and drain for all of them."""

import asyncio
import ipaddress
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from services.kit import health as health_module
from services.kit import telemetry
from services.kit.access import AccessGuard, rules_of
from services.kit.channels import MAX_MESSAGE_BYTES
from services.kit.errors import ErrorGuard
from services.kit.handlers import Guard, GuardedHandlers, Handler
from services.kit.health import HealthHandle, HealthServicer
from services.kit.owner import Owner
from services.kit.settings import MeshSettings
from services.kit.tokens import TokenBook, ensure_token
from services.kit.tracing import TracingGuard
from services.kit.wire.server import WireServer

__all__ = ["HealthHandle", "running_server", "serve"]

Register = Callable[[grpc.aio.Server], None]
OnDrain = Callable[[], Awaitable[None]]

_log = telemetry.logger(__name__)

# After the grace, cancelled handlers get this long for their `finally` blocks before the process leaves without them.
_CLEAN_UP_S: Final = 2.0
# Cancelled from outside, or after a crash: nothing is sound enough to wait for.
_CANCELLED_GRACE_S: Final = 0.2


async def serve(
    *,
    name: str,
    settings: MeshSettings,
    listen: str,
    register: Register,
    service_names: Sequence[str],
    owner: Owner,
    on_drain: OnDrain | None = None,
    started: Callable[[int], None] | None = None,
    health: HealthHandle | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (or `stop`), then drain and return.

    `register` adds the servicers, `service_names` are their full names; `started` gets the port once probes are told
    SERVING. Drain: NOT_SERVING, `on_drain()`, running calls end by themselves within `settings.drain_grace_s`, the rest
    is cancelled. A second signal ends the waiting. When a task of `owner` crashes, the server closes and serve raises
    OwnedTaskCrashed. Raises AccessRulesMissingError when an RPC has no access rule, OSError when the port is taken.
    """
    stops = _Stops()
    with _signals(stops):
        async with _open(
            name=name, settings=settings, listen=listen, register=register, service_names=service_names, health=health
        ) as running:
            if started is not None:
                started(running.port)
            try:
                await _first_of(stops.first.wait(), owner.wait_crashed(), *(() if stop is None else (stop.wait(),)))
            except asyncio.CancelledError:
                # Also how a crash arrives: the owner cancels the block that it belongs to.
                await running.close(_CANCELLED_GRACE_S)
                if owner.crash is None:
                    raise
            if owner.crash is not None:
                raise owner.crash from owner.crash.__cause__
            await _drain(running, settings.drain_grace_s, on_drain, stops)


@asynccontextmanager
async def running_server(
    *,
    name: str,
    settings: MeshSettings,
    register: Register,
    service_names: Sequence[str],
    listen: str = "127.0.0.1:0",
    on_drain: OnDrain | None = None,
    health: HealthHandle | None = None,
) -> AsyncIterator[int]:
    """Serve for the length of a block and give its port; drains like `serve`, but listens to no signals."""
    async with _open(
        name=name, settings=settings, listen=listen, register=register, service_names=service_names, health=health
    ) as running:
        try:
            yield running.port
        finally:
            await _drain(running, settings.drain_grace_s, on_drain, _Stops())


@dataclass(frozen=True, slots=True)
class _Running:
    server: WireServer
    health: HealthHandle
    port: int
    name: str

    async def close(self, grace_s: float | None) -> None:
        """Stop within the grace and the time handlers get to clean up; never hang on one that ignores cancellation."""
        self.health.mark_draining()
        try:
            async with asyncio.timeout((grace_s or 0) + _CLEAN_UP_S):
                await self.server.stop(grace_s)
        except TimeoutError:
            _log.error("handlers ignored their cancellation", service=self.name, waited_s=_CLEAN_UP_S)


@asynccontextmanager
async def _open(
    *,
    name: str,
    settings: MeshSettings,
    listen: str,
    register: Register,
    service_names: Sequence[str],
    health: HealthHandle | None,
) -> AsyncIterator[_Running]:
    health = HealthHandle() if health is None else health
    ensure_token(settings.state_dir, name)
    server = _build(settings, listen, register, service_names, health)
    port = server.bind(listen)
    await server.start()
    health.mark_started()
    _log.info("serving", listen=listen, port=port, services=list(service_names))
    running = _Running(server, health, port, name)
    try:
        yield running
    finally:
        await running.close(None)


def _build(
    settings: MeshSettings, listen: str, register: Register, service_names: Sequence[str], health: HealthHandle
) -> WireServer:
    if not settings.check_tokens and not _is_loopback(listen):
        raise ValueError(f"token checks may be off only on a loopback address, not on {listen}")
    book = TokenBook(settings.state_dir) if settings.check_tokens else None
    guards: list[Guard] = [
        ErrorGuard(draining=lambda: health.draining),
        AccessGuard(rules_of(service_names), book),
    ]
    if telemetry.tracing():
        guards.insert(0, TracingGuard())
    server = WireServer(most_bytes=MAX_MESSAGE_BYTES)
    registrar = _Registrar(server, guards)
    register(registrar.as_server())
    registrar.require(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(health, service_names), registrar.as_server())
    _add_reflection(registrar.as_server(), (*service_names, health_module.SERVICE_NAME))
    return server


def _is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class _Registrar:
    """Stands where generated code expects a server: puts guards before what it adds, and notes which services it adds."""

    def __init__(self, server: WireServer, guards: Sequence[Guard]) -> None:
        self._server = server
        self._guards = guards
        self._added: set[str] = set()

    def as_server(self) -> grpc.aio.Server:
        """Return this, by the name that generated code knows."""
        return cast("grpc.aio.Server", self)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        for handler in handlers:
            service_name = getattr(handler, "service_name", None)
            if service_name is None:
                raise TypeError("a handler without a service name cannot be checked for access rules")
            self._added.add(service_name())
        self._server.add(GuardedHandlers(handlers, self._guards))

    def add_registered_method_handlers(self, service_name: str, _handlers: Mapping[str, Handler]) -> None:
        """Take note only: generated code adds everything a second time, for a server that finds it faster."""
        self._added.add(service_name)

    def require(self, service_names: Sequence[str]) -> None:
        """Raise ValueError unless exactly the named services were added: no other has had its access rules read."""
        if self._added != set(service_names):
            raise ValueError(f"register added {sorted(self._added)}, but service_names are {sorted(service_names)}")


def _add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Add reflection as v1alpha and as v1: the messages are the same, and newer clients ask for v1 first."""
    servicer = reflection.aio.ReflectionServicer((*service_names, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    v1 = "grpc.reflection.v1.ServerReflection"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(v1, {"ServerReflectionInfo": handler}),))


@dataclass(slots=True)
class _Stops:
    """The first stop signal drains, the second hurries."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def _signals(stops: _Stops) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stops.signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _drain(running: _Running, grace_s: float, on_drain: OnDrain | None, stops: _Stops) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + grace_s
    _log.info("draining", grace_s=grace_s)
    running.health.mark_draining()
    if on_drain is not None:
        await _first_of(_say_goodbye(on_drain, grace_s), stops.second.wait())
    await _first_of(running.close(max(0.0, ends - loop.time())), _hurry(running, stops))


async def _say_goodbye(on_drain: OnDrain, grace_s: float) -> None:
    """Let the service end its own streams. If it fails or takes too long, the drain goes on without it."""
    try:
        async with asyncio.timeout(grace_s):
            await on_drain()
    except TimeoutError:
        _log.error("on_drain took longer than the grace", grace_s=grace_s)
    except Exception:  # noqa: BLE001 - whatever it is, the server must close
        _log.exception("on_drain failed")


async def _hurry(running: _Running, stops: _Stops) -> None:
    await stops.second.wait()
    _log.info("second signal: not waiting for running calls")
    await running.close(None)


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines side by side until the first ends, then cancel the others. They must not raise."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
