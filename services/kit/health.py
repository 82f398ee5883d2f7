"""grpc.health.v1 for one server: a status that is set at once, in the order things happen."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.kit.handlers import Context

_Status = health_pb2.HealthCheckResponse

SERVICE_NAME = "grpc.health.v1.Health"


class HealthHandle:
    """The health of one server: "" and each of its services are SERVING or NOT_SERVING together.

    Not serving until the server has started; not serving for good once it drains.
    """

    def __init__(self, *, serving: bool = True) -> None:
        self._wanted = serving
        self._started = False
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether probes are told SERVING now."""
        return self._wanted and self._started and not self._draining

    @property
    def draining(self) -> bool:
        """Whether the server is on its way out."""
        return self._draining

    def set(self, serving: bool) -> None:  # noqa: FBT001 - reads as a sentence
        """Say whether the service can do its work, e.g. False while its engine is dead."""
        self._wanted = serving
        self._announce()

    def mark_started(self) -> None:
        """Say that the port is open."""
        self._started = True
        self._announce()

    def mark_draining(self) -> None:
        """Say NOT_SERVING for good."""
        self._draining = True
        self._announce()

    def next_change(self) -> asyncio.Event:
        """Return the event that the next change sets. Take it before reading the status, so that no change is missed."""
        return self._changed

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package ships no types
    """Answers probes from a HealthHandle.

    Ours instead of the package's: that one sets a status in a coroutine, so two changes can overtake each other, and
    its Watch streams outlive the drain, which would then always take its whole grace.
    """

    def __init__(self, handle: HealthHandle, services: Iterable[str]) -> None:
        self._handle = handle
        self._services = frozenset({"", *services})

    async def Check(  # noqa: N802 - the contract's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Return the status; NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return _Status(status=self._status(request.service))

    async def Watch(  # noqa: N802 - the contract's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: Context,  # noqa: ARG002 - the contract's signature
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Stream the status now and at each change, until the server drains."""
        last = None
        while True:
            changed = self._handle.next_change()
            status = self._status(request.service)
            if status != last:
                yield _Status(status=status)
                last = status
            if self._handle.draining:
                return
            await changed.wait()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._handle.serving else _Status.NOT_SERVING
