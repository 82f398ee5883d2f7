"""A trace is told how long an ask waited and what came of it."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.admission import spans
from services.admission.core.model import Ask, Granted, Modality, Queued, Refusal, Rejected, Tier
from services.kit import telemetry

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
ASK = Ask("gpu0", Modality.IMAGE, Tier.PAID, 4, 120.0, "alice")


@pytest.fixture
def recorded():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.tracing_to(provider):
        yield exporter.get_finished_spans


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (Granted(1, 0.5), "granted"),
        (Rejected(1, Refusal.QUEUE_FULL, "10 of 10 wait", 2.0), "queue_full"),
        (Rejected(1, Refusal.SATURATED, "taken", None), "saturated"),
    ],
)
def test_a_wait_is_a_span_of_the_callers_trace_until_its_answer(recorded, event, outcome):
    span = spans.waiting(SAMPLED, ASK)
    assert not spans.heard(span, Queued(1, 1, None))
    assert recorded() == ()
    assert spans.heard(span, event)
    (found,) = recorded()
    assert found.name == "permit wait"
    assert (f"{found.context.trace_id:032x}", f"{found.parent.span_id:016x}") == (TRACE, PARENT)
    assert dict(found.attributes) == {
        "omniserve.pool": "gpu0",
        "omniserve.modality": "image",
        "omniserve.tier": "paid",
        "omniserve.units": 4,
        "omniserve.outcome": outcome,
    }


def test_who_leaves_after_the_answer_does_not_change_it(recorded):
    span = spans.waiting(SAMPLED, ASK)
    spans.heard(span, Granted(1, 0.0))
    spans.over(span, "withdrawn")
    assert [each.attributes["omniserve.outcome"] for each in recorded()] == ["granted"]


def test_who_leaves_the_line_is_told_apart(recorded):
    spans.over(spans.waiting(SAMPLED, ASK), "withdrawn")
    assert [each.attributes["omniserve.outcome"] for each in recorded()] == ["withdrawn"]


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED, "nonsense", f"00-{TRACE}-{PARENT}-"])
def test_what_nobody_records_has_no_span(recorded, traceparent):
    span = spans.waiting(traceparent, ASK)
    assert span is None
    assert spans.heard(span, Granted(1, 0.0))
    assert recorded() == ()


def test_without_a_collector_there_is_no_span():
    assert spans.waiting(SAMPLED, ASK) is None
