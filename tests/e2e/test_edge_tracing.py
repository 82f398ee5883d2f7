"""One trace from the caller's traceparent through the front door, and no query string in it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

pytestmark = pytest.mark.e2e

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = []

    def Export(self, request, context):  # noqa: N802 - the contract's name
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collector():
    sink = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield sink, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_the_callers_trace_goes_on_and_the_query_stays_out_of_it(open_door, tmp_path, wait_until):
    with collector() as (sink, endpoint), open_door(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint) as door:
        sent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        response = httpx.get(f"{door.public_url}/v1/models?secret=hunter2", headers=sent)
        behind = dict(response.json()["headers"])
        wait_until(lambda: len([s for s in sink.spans if s.trace_id.hex() == TRACE]) >= 2, "both spans of the door")
        spans = [span for span in sink.spans if span.trace_id.hex() == TRACE]
    assert behind["traceparent"].split("-")[1] == TRACE
    assert response.headers["traceparent"].split("-")[1] == TRACE
    assert behind["traceparent"].split("-")[2] in {span.span_id.hex() for span in spans}
    tags = {tag.key: tag.value.string_value for span in spans for tag in span.attributes}
    assert tags["url.path"] == "/v1/models"
    assert "hunter2" not in str(spans)


def test_without_a_collector_a_caller_still_gets_its_own_trace_back(door):
    sent = f"00-{TRACE}-b7ad6b7169203331-00"
    response = httpx.get(f"{door.public_url}/v1/models", headers={"traceparent": sent})
    assert response.headers["traceparent"] == sent
