"""One trace from the caller's traceparent through the facade to llm."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.kit.telemetry import tracing_to

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_the_work_of_llm_is_below_the_facades_span_which_is_below_the_callers(mesh, chat):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    mesh.http.headers["traceparent"] = f"00-{TRACE}-00f067aa0ba902b7-01"
    with tracing_to(provider):
        asking = chat()
        started = await mesh.llm.started()
        started.finish()
        answer = await asking
        await mesh.http.get("/health")
    (span,) = [each for each in exporter.get_finished_spans() if each.kind.name == "SERVER"]
    assert span.name == "POST /v1/chat/completions"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert span.attributes["http.response.status_code"] == 200
    assert started.start.traceparent == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert answer.headers["traceparent"] == started.start.traceparent


async def test_without_tracing_the_callers_trace_is_passed_on_and_told_back(mesh, chat):
    theirs = f"00-{TRACE}-00f067aa0ba902b7-01"
    mesh.http.headers["traceparent"] = theirs
    asking = chat()
    started = await mesh.llm.started()
    started.finish()
    assert started.start.traceparent == theirs
    assert (await asking).headers["traceparent"] == theirs


async def test_a_traceparent_that_is_none_is_neither_passed_on_nor_told_back(mesh, chat):
    mesh.http.headers["traceparent"] = "00-nonsense"
    asking = chat()
    started = await mesh.llm.started()
    started.finish()
    assert started.start.traceparent == ""
    assert "traceparent" not in (await asking).headers
