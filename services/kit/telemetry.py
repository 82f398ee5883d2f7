"""Logs and traces. Logs are JSON lines on stderr; traces go out over OTLP/gRPC when an endpoint is set, else cost nothing."""

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import trace
from opentelemetry.propagate import inject

from services.kit.context import current_request
from services.kit.lean import without

with without("rich"):  # for a console, where we write JSON; a quarter of what a service's imports cost
    import structlog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# The most a collector that does not answer may hold up the end of a process.
_EXPORT_S = 2


class TelemetrySettings(Protocol):
    """What telemetry needs to know; MeshSettings has it."""

    @property
    def log_level(self) -> str:
        """debug, info, warning or error."""
        ...

    @property
    def otlp_endpoint(self) -> str:
        """Where traces go, e.g. http://127.0.0.1:4317; empty turns tracing off."""
        ...


@dataclass(slots=True)
class _State:
    provider: "TracerProvider | None" = None


_state = _State()
_OFF = trace.NoOpTracerProvider()


def setup_telemetry(service: str, settings: TelemetrySettings) -> None:
    """Start logging, and tracing if `otlp_endpoint` is set. Call once per process, after a fork or spawn, not before.

    Without an endpoint there is no exporter, no thread and no span.
    """
    setup_logging(service, settings.log_level)
    if not settings.otlp_endpoint:
        return
    _state.provider = _exporting(service, settings.otlp_endpoint)
    trace.set_tracer_provider(_state.provider)  # for libraries that look for the global one


def _exporting(service: str, endpoint: str) -> "TracerProvider":
    # Imported only here: the SDK and the exporter cost start-up time and memory that "off" must not pay.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)))
    return provider


def flush_telemetry() -> None:
    """Send what is buffered; gives up after 2 s. Blocks: call it from a thread, at the end of the process."""
    if _state.provider is not None:
        _state.provider.force_flush()


@contextmanager
def tracing_to(provider: "TracerProvider") -> Iterator[None]:
    """Send spans to another provider for the length of a block."""
    former, _state.provider = _state.provider, provider
    try:
        yield
    finally:
        _state.provider = former


def tracing() -> bool:
    """Return whether spans are recorded at all."""
    return _state.provider is not None


def current_traceparent() -> str:
    """Return the W3C trace context of the current span; "" outside of one and while tracing is off."""
    if not tracing():
        return ""
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier.get("traceparent", "")


def tracer(name: str) -> trace.Tracer:
    """Return the tracer of a module; its spans are no-ops while tracing is off.

    Ask for it when a span starts, not at import: set-up comes after the imports.
    """
    return (_state.provider or _OFF).get_tracer(name)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger: `log.info("event", key=value)`."""
    bound: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return bound


def setup_logging(service: str, level: str) -> None:
    """Send every log record, of ours and of libraries, to stderr as one JSON object a line."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _ServiceName(service),
        _ids_of_request,
        structlog.processors.format_exc_info,
    ]
    _configure(*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


@dataclass(frozen=True, slots=True)
class _ServiceName:
    service: str

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:  # noqa: ANN401
        event["service"] = self.service
        return event


def _ids_of_request(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:  # noqa: ANN401
    """Add request, trace and span id; while tracing is off, the trace is the one of the caller's traceparent."""
    request = current_request()
    if request is not None:
        event.setdefault("request_id", request.request_id)
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"], event["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        return event
    if request is not None and request.traceparent is not None:
        event["trace_id"] = request.traceparent.split("-")[1]
    return event


def _configure(*processors: structlog.typing.Processor) -> None:
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *processors],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


# Until a service sets logging up (in tools and tests it never does), lines go to the standard library's loggers as they
# are: structlog's own default would print them on stdout.
if not structlog.is_configured():
    _configure(structlog.stdlib.render_to_log_kwargs)
