"""What a trace is told of an ask: how long it waited, for what, and what came of it."""

from typing import Final

from opentelemetry.propagate import extract
from opentelemetry.trace import Span

from services.admission.core.model import Ask, Event, Granted, Rejected
from services.kit import telemetry

_SAMPLED: Final = 0x01


def waiting(traceparent: str, ask: Ask) -> Span | None:
    """Begin the span of a wait in the trace of who asks; None while tracing is off and in a trace that nobody records."""
    if not telemetry.tracing() or not _is_sampled(traceparent):
        return None
    return telemetry.tracer(__name__).start_span(
        "permit wait",
        context=extract({"traceparent": traceparent}),
        attributes={
            "omniserve.pool": ask.pool,
            "omniserve.modality": ask.modality.name.lower(),
            "omniserve.tier": ask.tier.name.lower(),
            "omniserve.units": ask.units,
        },
    )


def heard(span: Span | None, event: Event) -> bool:
    """End the span if the event ends the wait; return whether it does."""
    if isinstance(event, Granted):
        over(span, "granted")
    elif isinstance(event, Rejected):
        over(span, event.refusal.value)
    else:
        return False
    return True


def over(span: Span | None, outcome: str) -> None:
    """End the span of a wait that ended so; one that has ended already stays as it was."""
    if span is not None and span.is_recording():
        span.set_attribute("omniserve.outcome", outcome)
        span.end()


def _is_sampled(traceparent: str) -> bool:
    """Return whether the trace's last field says that it is recorded; most requests of a busy house are not."""
    try:
        return bool(int(traceparent[-2:], 16) & _SAMPLED)
    except ValueError:
        return False
