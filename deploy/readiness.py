"""Asks each process whether it can do its work: gRPC health for services, HTTP for the facade and the front door."""

import http.client
import socket
from collections.abc import Callable, Mapping
from contextlib import closing

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Probe = Callable[[], bool]

_TIMEOUT_S = 1.0
_CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300))


def grpc_probe(address: str, service: str = "") -> Probe:
    """Return a probe of a gRPC server's health (`host:port`; the whole server, or one service by its full name)."""
    stub: health_pb2_grpc.HealthStub | None = None

    def serving() -> bool:
        nonlocal stub
        if stub is None and not _is_open(address):
            return False  # a channel would try again and again in the background, at the expense of those who start
        stub = stub or health_pb2_grpc.HealthStub(grpc.insecure_channel(address, options=_CHANNEL_OPTIONS))
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return serving


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S).close()
    except OSError:
        return False
    return True


def http_probe(address: str, path: str) -> Probe:
    """Return a probe that wants 200 for a GET of the path (`host:port`)."""

    def answers() -> bool:
        try:
            return http_get(address, path)[0] == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    return answers


def http_get(address: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a GET. Raises OSError or HTTPException."""
    with closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", path, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
