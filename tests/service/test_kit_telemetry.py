"""Traces over several services: in one process with the SDK's in-memory exporter, and in processes over real OTLP."""

# ruff: noqa: N802 - servicer methods carry the contract's names

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from services.kit import telemetry
from services.kit.channels import ending, open_channel
from services.kit.context import current_request
from services.kit.errors import DomainError, Reason
from services.kit.server import running_server
from services.kit.settings import MeshSettings

ROOT = Path(__file__).resolve().parents[2]
LLM, ADMISSION = "omniserve.llm.v1.LlmService", "omniserve.admission.v1.AdmissionService"
CHAT, ACQUIRE = f"{LLM}/Chat", f"{ADMISSION}/Acquire"
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
SERVER, CLIENT = trace.SpanKind.SERVER, trace.SpanKind.CLIENT


class Settings(MeshSettings):
    service = "llm"


class Admission(admission_pb2_grpc.AdmissionServiceServicer):
    def __init__(self):
        self.traceparents = []
        self.request_ids = []

    async def Acquire(self, request_iterator, context):
        self.traceparents.append(dict(context.invocation_metadata()).get("traceparent"))
        self.request_ids.append(current_request().request_id)
        async for _ in request_iterator:
            yield admission_pb2.AcquireResponse(granted=admission_pb2.Granted())


class Llm(llm_pb2_grpc.LlmServiceServicer):
    """A chat asks admission, works in a span of its own and streams; the model's name says how it ends."""

    def __init__(self, admission):
        self.admission = admission_pb2_grpc.AdmissionServiceStub(admission)
        self.waiting = asyncio.Event()

    async def Chat(self, request, context):
        with ending(self.admission.Acquire()) as permit:
            await permit.write(admission_pb2.AcquireRequest())
            await permit.read()
            yield llm_pb2.ChatResponse(prefill=llm_pb2.Prefill())
            with telemetry.tracer("llm").start_as_current_span("decode"):
                await asyncio.sleep(0)
            if request.model == "bad":
                raise DomainError(Reason.ENGINE_FAILED, "out of paper")
            if request.model == "endless":
                self.waiting.set()
                await asyncio.Event().wait()
            yield llm_pb2.ChatResponse(done=llm_pb2.Done())


@asynccontextmanager
async def mesh(state_dir):
    """Serve llm and admission; give llm's servicer, admission's and a channel of the facade to llm."""
    settings, admission = Settings(state_dir=state_dir), Admission()
    async with (
        running_server(
            name="admission",
            settings=settings,
            register=lambda server: admission_pb2_grpc.add_AdmissionServiceServicer_to_server(admission, server),
            service_names=[ADMISSION],
        ) as admission_port,
        open_channel(f"127.0.0.1:{admission_port}", caller="llm", state_dir=state_dir) as to_admission,
    ):
        llm = Llm(to_admission)
        async with (
            running_server(
                name="llm",
                settings=settings,
                register=lambda server: llm_pb2_grpc.add_LlmServiceServicer_to_server(llm, server),
                service_names=[LLM],
            ) as port,
            open_channel(f"127.0.0.1:{port}", caller="facade", state_dir=state_dir) as channel,
        ):
            yield llm, admission, llm_pb2_grpc.LlmServiceStub(channel)


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.tracing_to(provider):
        yield exporter
    provider.shutdown()


def tree(exporter):
    """Return each finished span as (name, kind) -> (its id, its parent's id, the span)."""
    return {
        (span.name, span.kind): (span.context.span_id, span.parent and span.parent.span_id, span)
        for span in exporter.get_finished_spans()
    }


async def chat(stub, model="", **kwargs):
    return [event async for event in stub.Chat(llm_pb2.ChatRequest(model=model), **kwargs)]


async def test_one_trace_runs_from_the_callers_traceparent_through_both_services(tmp_path, spans):
    async with mesh(tmp_path) as (_, _, stub):
        with trace.use_span(
            trace.NonRecordingSpan(
                trace.SpanContext(int("a" * 32, 16), int("b" * 16, 16), is_remote=True, trace_flags=trace.TraceFlags(1))
            )
        ):
            await chat(stub)
    found = tree(spans)
    assert {span.context.trace_id for _, _, span in found.values()} == {int("a" * 32, 16)}
    client, server = found[CHAT, CLIENT], found[CHAT, SERVER]
    to_admission, admission = found[ACQUIRE, CLIENT], found[ACQUIRE, SERVER]
    decode = found["decode", trace.SpanKind.INTERNAL]
    assert client[1] == int("b" * 16, 16)
    assert server[1] == client[0]
    assert to_admission[1] == server[0]
    assert admission[1] == to_admission[0]
    assert decode[1] == server[0]
    assert server[2].attributes["rpc.grpc.status_code"] == 0
    assert client[2].attributes["rpc.grpc.status_code"] == 0


async def test_the_span_of_a_stream_stays_open_until_the_stream_ends(tmp_path, spans):
    async with mesh(tmp_path) as (llm, _, stub):
        with ending(stub.Chat(llm_pb2.ChatRequest(model="endless"))) as call:
            await call.read()
            await llm.waiting.wait()
            assert set(tree(spans)) == {("decode", trace.SpanKind.INTERNAL)}
    decode, server = tree(spans)["decode", trace.SpanKind.INTERNAL][2], tree(spans)[CHAT, SERVER][2]
    assert server.start_time <= decode.start_time
    assert decode.end_time <= server.end_time


async def test_a_failure_marks_the_spans_of_both_sides(tmp_path, spans):
    async with mesh(tmp_path) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError):
            await chat(stub, "bad")
    for kind in (SERVER, CLIENT):
        span = tree(spans)[CHAT, kind][2]
        assert span.status.status_code is trace.StatusCode.ERROR
        assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.INTERNAL.value[0]
    assert tree(spans)[CHAT, SERVER][2].status.description == "out of paper"


async def test_a_caller_that_leaves_ends_all_spans_and_is_no_error(tmp_path, spans, caplog):
    async with mesh(tmp_path) as (llm, _, stub):
        reader = asyncio.ensure_future(chat(stub, "endless"))
        await llm.waiting.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    found = tree(spans)
    assert set(found) == {
        (CHAT, CLIENT), (CHAT, SERVER), (ACQUIRE, CLIENT), (ACQUIRE, SERVER), ("decode", trace.SpanKind.INTERNAL)
    }  # fmt: skip
    for kind in (SERVER, CLIENT):
        span = found[CHAT, kind][2]
        assert span.status.status_code is trace.StatusCode.UNSET
        assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]
    assert not [record for record in caplog.records if "detach" in record.getMessage()]


async def test_calls_side_by_side_keep_to_their_own_traces(tmp_path, spans):
    async with mesh(tmp_path) as (_, _, stub):
        await asyncio.gather(*(chat(stub) for _ in range(20)))
        assert trace.get_current_span() is trace.INVALID_SPAN
    by_trace: dict[int, list[str]] = {}
    for span in spans.get_finished_spans():
        by_trace.setdefault(span.context.trace_id, []).append(span.name)
    assert len(by_trace) == 20
    assert all(sorted(names) == sorted([CHAT, CHAT, ACQUIRE, ACQUIRE, "decode"]) for names in by_trace.values())


async def test_with_tracing_off_trace_context_and_request_id_still_pass_through(tmp_path):
    async with mesh(tmp_path) as (_, admission, stub):
        await chat(stub, metadata=(("traceparent", TRACEPARENT), ("x-request-id", "r7")))
        await chat(stub)
    assert admission.traceparents == [TRACEPARENT, None]
    assert admission.request_ids[0] == "r7"
    assert admission.request_ids[1] != "r7"


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans over OTLP."""

    def __init__(self):
        self.spans = []

    async def Export(self, request, context):
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


SERVICE = textwrap.dedent("""
    from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
    from services.kit import telemetry
    from services.kit.channels import open_channel
    from services.kit.run import run
    from services.kit.server import serve
    from services.kit.settings import MeshSettings, knob

    class Settings(MeshSettings):
        service = NAME
        upstream: str = knob("", "Whom to ask.")

    class Llm(llm_pb2_grpc.LlmServiceServicer):
        def __init__(self, settings):
            self.upstream = settings.upstream and llm_pb2_grpc.LlmServiceStub(
                open_channel(settings.upstream, caller=NAME, state_dir=settings.state_dir)
            )

        async def ListModels(self, request, context):
            telemetry.logger("svc").info("listing")
            return await self.upstream.ListModels(request) if self.upstream else llm_pb2.ListModelsResponse()

    async def main(settings, owner):
        await serve(
            name=NAME, settings=settings, listen="127.0.0.1:0", owner=owner,
            started=lambda port: print(port, flush=True),
            register=lambda server: llm_pb2_grpc.add_LlmServiceServicer_to_server(Llm(settings), server),
            service_names=["omniserve.llm.v1.LlmService"],
        )

    run(Settings, main)
""")


@pytest.fixture
def start(tmp_path):
    processes = []

    def begin(name, **variables):
        script = tmp_path / f"{name}.py"
        script.write_text(f"NAME = {name!r}\n{SERVICE}")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMNISERVE_", "OTEL_"))}
        paths = os.pathsep.join([str(ROOT), str(ROOT / "protos" / "gen")])
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**clean, "PYTHONPATH": paths, "OMNISERVE_STATE_DIR": str(tmp_path), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


async def test_two_processes_export_one_trace_over_otlp_before_they_end_and_log_its_id(start, tmp_path):
    receiver = Receiver()
    collector = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    await collector.start()
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "3600000"}

    back = start("back", **endpoint)
    back_port = int(await asyncio.to_thread(back.stdout.readline))
    front = start("front", OMNISERVE_FRONT_UPSTREAM=f"127.0.0.1:{back_port}", **endpoint)
    front_port = int(await asyncio.to_thread(front.stdout.readline))
    async with open_channel(f"127.0.0.1:{front_port}", caller="facade", state_dir=tmp_path) as channel:
        await llm_pb2_grpc.LlmServiceStub(channel).ListModels(
            llm_pb2.ListModelsRequest(), metadata=(("traceparent", TRACEPARENT), ("x-request-id", "r7"))
        )
    assert receiver.spans == [], "the batch is an hour away: only the drain can send it"
    logs = []
    for process in (front, back):
        process.terminate()
        logs.append((await asyncio.to_thread(process.communicate))[1])
        assert process.returncode == 0
    await collector.stop(None)

    assert {span.trace_id.hex() for _, span in receiver.spans} == {"a" * 32}
    kinds = sorted((service, int(span.kind)) for service, span in receiver.spans)
    assert kinds == [("back", 2), ("front", 2), ("front", 3)]
    by_id = {span.span_id: (service, span) for service, span in receiver.spans}
    (leaf,) = [span for service, span in receiver.spans if service == "back"]
    middle = by_id[leaf.parent_span_id][1]
    assert by_id[middle.parent_span_id][1].parent_span_id.hex() == "b" * 16
    for log in logs:
        (line,) = [line for line in log.splitlines() if '"listing"' in line]
        assert "a" * 32 in line
        assert '"request_id": "r7"' in line


async def test_a_collector_that_is_down_neither_fails_a_call_nor_the_end_of_the_process(start, tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: refused
        process = start("lone", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{nobody.getsockname()[1]}")
        port = int(await asyncio.to_thread(process.stdout.readline))
        async with open_channel(f"127.0.0.1:{port}", caller="facade", state_dir=tmp_path) as channel:
            await llm_pb2_grpc.LlmServiceStub(channel).ListModels(llm_pb2.ListModelsRequest())
        process.terminate()
        await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
