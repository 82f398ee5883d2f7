"""One span for each RPC that is served, from the first byte to the last.

Not the OpenTelemetry package's interceptor: that one turns every streaming handler into a generator around a generator,
which breaks handlers that write to the context themselves, and when a caller leaves, its span ends in the garbage
collector's task, where detaching its context fails.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.propagate import extract

from services.kit import telemetry
from services.kit.access import OPEN_SERVICES
from services.kit.handlers import Context, Handler, Wrapping


class TracingGuard:
    """Continues the caller's trace with a SERVER span; probes get none."""

    def __init__(self) -> None:
        self._wrapping = Wrapping(_span)

    def guard(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Wrap the handler of any of the four RPC kinds."""
        if details.method.split("/")[1] in OPEN_SERVICES:
            return handler
        return self._wrapping.of(handler, details.method)


@asynccontextmanager
async def _span(context: Context, path: str) -> AsyncIterator[None]:
    service, _, method = path.lstrip("/").rpartition("/")
    carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    with telemetry.tracer(__name__).start_as_current_span(
        f"{service}/{method}",
        context=extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except asyncio.CancelledError:
            span.set_attribute("rpc.grpc.status_code", grpc.StatusCode.CANCELLED.value[0])
            span.add_event("cancelled")
            raise
        except grpc.aio.AbortError:
            _record(span, context)
            raise
        _record(span, context)


def _record(span: trace.Span, context: Context) -> None:
    code: Any = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
    span.set_attribute("rpc.grpc.status_code", number)
    if number != 0:
        span.set_status(trace.StatusCode.ERROR, context.details() or None)
