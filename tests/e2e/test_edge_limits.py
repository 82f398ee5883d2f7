"""Bodies that are too large, services that are not there: one clear error in OpenAI's shape."""

import http.client
import json
import socket

import httpx
import pytest

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024


def pieces(count):
    for _ in range(count):
        yield bytes(MIB)


def test_a_body_at_the_limit_comes_through(door):
    response = httpx.post(f"{door.public_url}/v1/chat/completions", content=bytes(80 * MIB), timeout=60)
    assert response.json()["received"] == 80 * MIB


def test_a_declared_length_above_the_limit_is_refused_before_a_byte_is_read(door):
    host, port = door.public_target.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {100 * MIB}\r\n\r\n"
        connection.sendall(head.encode())
        response = http.client.HTTPResponse(connection)
        response.begin()
        error = json.loads(response.read())["error"]
    assert response.status == 413
    assert (error["code"], error["type"], error["param"]) == ("too_large", "invalid_request_error", None)
    assert "80 MiB" in error["message"]
    assert error["request_id"] == response.headers["x-request-id"]


def test_a_client_that_sends_100_mib_all_the_same_still_reads_its_413(door):
    response = httpx.post(f"{door.public_url}/v1/chat/completions", content=bytes(100 * MIB), timeout=60)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


def test_a_chunked_100_mib_body_is_refused_too(door):
    response = httpx.post(f"{door.public_url}/v1/chat/completions", content=pieces(100), timeout=60)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


def test_a_service_that_is_not_there_is_a_503_that_says_when_to_come_back(open_door, tmp_path, free_ports):
    nowhere = f"127.0.0.1:{free_ports(1)[0]}"
    with open_door(tmp_path, OMNISERVE_LLM_ADDRESS=nowhere, OMNISERVE_EDGE_HOLD_S="1") as door:
        response = httpx.post(
            f"{door.public_url}/omniserve.llm.v1.LlmService/Chat",
            headers={"content-type": "application/json"},
            timeout=20,
        )
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["reason"], error["type"]) == ("no_capacity", "server_error")
    assert (response.headers["retry-after"], error["retry_after_ms"]) == ("1", 1000)
