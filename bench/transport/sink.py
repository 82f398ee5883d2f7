"""A collector of traces that only counts the spans."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator


class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what the front doors export. `spans`: how many came."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(  # noqa: N802 - the contract's name
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,  # noqa: ARG002 - gRPC gives it
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Count the spans."""
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def sink() -> Iterator[tuple[Sink, str]]:
    """Run one in this process for the length of a block; yield it and its endpoint."""
    counting = Sink()
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # ships no types
    add(counting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield counting, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
