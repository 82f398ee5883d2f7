"""Channels to peers: the caller's token on every call, keepalive, retries where they are safe, one span per call.

The token and the trace context are added by a thin channel around gRPC's own instead of by client interceptors: an
intercepted call is another object with a task of its own, costs more per message, and keeps spans open when a stream
is never read or its caller is cancelled. Here the caller gets gRPC's own call, and its end ends the span.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from opentelemetry import trace
from opentelemetry.propagate import inject

from services.kit import telemetry
from services.kit.access import CLIENT_KEY, REQUEST_ID_KEY, TIER_KEY, TOKEN_KEY, TRACEPARENT_KEY
from services.kit.context import current_request
from services.kit.handlers import Context
from services.kit.settings import PEERS
from services.kit.tokens import ensure_token

MAX_MESSAGE_BYTES: Final = 96 * 1024 * 1024

C = TypeVar("C", bound=grpc.aio.Call)
Metadata = tuple[tuple[str, str | bytes], ...]

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A hung or vanished peer is noticed within 15 s, also while nothing is being said.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found within about a second instead of gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 1),
)
_RETRY: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_THROTTLE: Final = {"maxTokens": 20, "tokenRatio": 0.2}
_SAFE: Final = frozenset({descriptor_pb2.MethodOptions.IDEMPOTENT, descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS})


def open_channel(address: str, *, caller: str, state_dir: Path, peers: Iterable[str] = PEERS) -> grpc.aio.Channel:
    """Return a channel to a peer (`host:port`) that shows the caller's service token on every call.

    Connects at the first call. UNAVAILABLE is retried on unary RPCs whose contract says `idempotency_level`; streams and
    all other failures are the caller's to judge, and so are deadlines and `wait_for_ready`. `peers` names the contracts
    (`omniserve.<peer>.v1`) whose RPCs are looked through for that.
    """
    options = (*OPTIONS, ("grpc.service_config", json.dumps(service_config(peers))))
    return MeshChannel(grpc.aio.insecure_channel(address, options=options), identity(caller, state_dir))


def identity(caller: str, state_dir: Path) -> Metadata:
    """Return the metadata by which a caller is known: its service token, made if there is none yet."""
    return ((TOKEN_KEY, ensure_token(state_dir, caller)),)


def service_config(peers: Iterable[str]) -> dict[str, Any]:
    """Return gRPC's service config: retries for the idempotent unary RPCs of the peers whose contracts are imported."""
    names = [{"service": service, "method": method} for service, method in _retryable(peers)]
    config: dict[str, Any] = {"retryThrottling": _THROTTLE}
    if names:  # an empty list would be a config for every RPC
        config["methodConfig"] = [{"name": names, "retryPolicy": _RETRY}]
    return config


def _retryable(peers: Iterable[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for peer in peers:
        try:
            file = descriptor_pool.Default().FindFileByName(f"omniserve/{peer}/v1/{peer}.proto")
        except KeyError:
            continue  # this process does not import the contract, so it does not call the peer
        for service in file.services_by_name.values():
            found += [
                (service.full_name, method.name)
                for method in service.methods
                if not (method.client_streaming or method.server_streaming)
                and method.GetOptions().idempotency_level in _SAFE
            ]
    return found


def call_metadata(*, client: str, tier: str, request_id: str) -> Metadata:
    """Return the metadata with which a service that speaks for clients says for whom it calls."""
    return ((CLIENT_KEY, client), (TIER_KEY, tier), (REQUEST_ID_KEY, request_id))


def time_left_s(context: Context, *, at_most_s: float) -> float:
    """Return the deadline for calls made on behalf of an RPC, seconds: what is left of its own, at most `at_most_s`."""
    left = context.time_remaining()
    return at_most_s if left is None else max(0.0, min(at_most_s, left))


@contextmanager
def ending(call: C) -> Iterator[C]:
    """Cancel a call when the block ends, however it ends; no effect on one that is over.

    For streams that may be left early: gRPC itself notices only when the garbage collector finds the call.
    """
    try:
        yield call
    finally:
        call.cancel()


class MeshChannel(grpc.aio.Channel):
    """gRPC's channel, with the caller's token and the trace context on every call."""

    def __init__(self, channel: grpc.aio.Channel, identity: Metadata) -> None:
        self._channel = channel
        self._identity = identity

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        """Return the callable of a unary RPC."""
        return self._tagged(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        """Return the callable of a server-streaming RPC."""
        call = self._tagged(method, self._channel.unary_stream(method, *args, **kwargs))
        return lambda *args, **kwargs: _StreamCall(call(*args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        """Return the callable of a client-streaming RPC."""
        return self._tagged(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        """Return the callable of a bidirectional RPC."""
        call = self._tagged(method, self._channel.stream_stream(method, *args, **kwargs))
        return lambda *args, **kwargs: _StreamCall(call(*args, **kwargs))

    def _tagged(self, path: str, call: Callable[..., grpc.aio.Call]) -> Callable[..., grpc.aio.Call]:
        def start(*args: Any, metadata: Iterable[Any] | None = None, **kwargs: Any) -> grpc.aio.Call:  # noqa: ANN401
            given = cast("Metadata", tuple(metadata or ()))
            keys = {key for key, _ in given}
            if not telemetry.tracing():
                return call(*args, metadata=(*self._identity, *given, *_passed_on(keys)), **kwargs)
            span = _client_span(path)
            carrier: dict[str, str] = {}
            inject(carrier, trace.set_span_in_context(span))
            added = tuple(item for item in carrier.items() if item[0] not in keys)
            started = call(*args, metadata=(*self._identity, *given, *added, *_request_id(keys)), **kwargs)
            started.add_done_callback(lambda ended: _end(span, ended))
            return started

        return start

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; calls in flight get `grace` seconds, then are cancelled."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - gRPC's signature
        """Return the connection's state."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state is another."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel is connected."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _StreamCall:
    """gRPC's call with a response stream; a reader who is cancelled always cancels the call.

    gRPC does so only while it waits for a message. Cancelled in its wait for the call's start, a reader just goes away,
    and the RPC runs on at the peer until the garbage collector finds the call.
    """

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - UnaryStreamCall or StreamStreamCall
        self._call = call

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - everything else is gRPC's
        return getattr(self._call, name)

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for message in self._call:
                yield message
        except asyncio.CancelledError:
            self._call.cancel()
            raise

    async def read(self) -> Any:  # noqa: ANN401 - a message, or EOF
        try:
            return await self._call.read()
        except asyncio.CancelledError:
            self._call.cancel()
            raise


def _passed_on(keys: set[str]) -> Metadata:
    """Return what an RPC being served hands on to the calls it makes: its request id and its caller's trace context."""
    request = current_request()
    if request is None or request.traceparent is None or TRACEPARENT_KEY in keys:
        return _request_id(keys)
    return (*_request_id(keys), (TRACEPARENT_KEY, request.traceparent))


def _request_id(keys: set[str]) -> Metadata:
    request = current_request()
    return () if request is None or REQUEST_ID_KEY in keys else ((REQUEST_ID_KEY, request.request_id),)


def _client_span(path: str) -> trace.Span:
    service, _, method = path.lstrip("/").rpartition("/")
    attributes: Mapping[str, str] = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    return telemetry.tracer(__name__).start_span(
        f"{service}/{method}", kind=trace.SpanKind.CLIENT, attributes=attributes
    )


def _end(span: trace.Span, call: grpc.aio.Call) -> None:
    code = _at_once(call.code())
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
        span.set_status(trace.StatusCode.ERROR, code.name)
    span.end()


def _at_once(status: Any) -> grpc.StatusCode:  # noqa: ANN401 - a coroutine that does not wait any more
    """Return the result of a coroutine that has nothing to wait for: the status of a call that has ended."""
    try:
        status.send(None)
    except StopIteration as done:
        return cast("grpc.StatusCode", done.value)
    status.close()
    return grpc.StatusCode.UNKNOWN
