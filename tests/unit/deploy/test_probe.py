import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deploy.probe import main


@contextmanager
def http_server(status):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def grpc_server(status):
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
def test_an_http_server_is_healthy_when_it_answers_200(status, exit_status):
    with http_server(status) as address:
        assert main(["http", address, "/readyz"]) == exit_status


@pytest.mark.parametrize(("status", "exit_status"), [("SERVING", 0), ("NOT_SERVING", 1)])
def test_a_grpc_server_is_healthy_when_it_says_serving(status, exit_status):
    with grpc_server(health_pb2.HealthCheckResponse.ServingStatus.Value(status)) as address:
        assert main(["grpc", address]) == exit_status


@pytest.mark.parametrize("arguments", [["grpc", "127.0.0.1:1"], ["http", "127.0.0.1:1", "/"]])
def test_nobody_there_is_unhealthy(arguments):
    assert main(arguments) == 1
