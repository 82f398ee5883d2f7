import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.kit import telemetry
from services.kit.clock import ManualClock
from services.llm.core.options import AskedOptions, check_options
from services.llm.core.prompt import Chat, Turn
from services.llm.core.wire import Finish, Limits, Sampling
from services.llm.spans import Timeline, generation_span

OPTIONS = check_options(AskedOptions(), vocabulary=10, defaults=Sampling(temperature=0.5))


def generate(clock: ManualClock, *, fail: bool = False) -> Timeline:
    timeline = Timeline(clock)
    with generation_span("m", Chat((Turn("user"),)), OPTIONS, Limits(9), timeline):
        clock.advance(1.0)
        timeline.granted()
        clock.advance(0.25)
        timeline.gained()
        if fail:
            raise RuntimeError("engine")
        clock.advance(2.0)
        timeline.gained()
        timeline.ended([Finish("stop", None, 12, 3, 7)])
    return timeline


def test_a_generation_s_times_are_told_apart() -> None:
    timeline = generate(ManualClock())
    assert (timeline.queue_ms, timeline.prefill_ms, timeline.decode_ms) == (1000, 250, 2000)


def test_a_trace_shows_queue_prefill_and_decode_inside_the_generation() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.tracing_to(provider):
        generate(ManualClock())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"chat m", "queue", "prefill", "decode"}
    whole = spans["chat m"]
    attributes = dict(whole.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (12, 7)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    for name, seconds in (("queue", 1.0), ("prefill", 0.25), ("decode", 2.0)):
        span = spans[name]
        assert span.parent is not None
        assert span.parent.span_id == whole.context.span_id
        assert span.end_time - span.start_time == pytest.approx(seconds * 1e9, rel=1e-6)


def test_a_generation_that_breaks_shows_how_far_it_came() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.tracing_to(provider), pytest.raises(RuntimeError):
        generate(ManualClock(), fail=True)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["queue", "prefill", "decode", "chat m"]
