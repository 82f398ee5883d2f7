"""What a caller says about itself does not survive the front door; what the door says does."""

import socket

import httpx
import pytest

pytestmark = pytest.mark.e2e


def headers_behind(response):
    assert response.status_code == 200, response.text
    seen = {}
    for name, value in response.json()["headers"]:
        seen.setdefault(name, []).append(value)
    return seen


def raw_status(target, request):
    host, port = target.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        return connection.recv(4096).decode(errors="replace").splitlines()[0]


def test_a_caller_cannot_name_itself_or_its_listener(door):
    spoofed = [
        ("x-omniserve-listener", "operator"),
        ("X-OmniServe-Client", "somebody-rich"),
        ("x-omniserve-service-token", door.token("envoy-operator")),
        ("x-omniserve-internal", "local"),
        ("x-om-asked-tier", "paid"),
        ("x-envoy-upstream-rq-timeout-ms", "1"),
        ("X-Envoy-Original-Path", "/admin/hold"),
        ("x-request-id", "chosen-by-me"),
    ]
    seen = headers_behind(httpx.get(f"{door.public_url}/v1/models", headers=spoofed))
    assert seen["x-omniserve-listener"] == ["public"]
    assert seen["x-omniserve-client"] == ["anonymous"]
    assert seen["x-omniserve-service-token"] == [door.token("envoy-public")]
    assert seen["x-request-id"] != ["chosen-by-me"]
    assert "x-omniserve-tier" not in seen
    strangers = {"x-omniserve-internal", "x-om-asked-tier", "x-envoy-upstream-rq-timeout-ms", "x-envoy-original-path"}
    assert not strangers & set(seen)


def test_the_asked_tier_arrives_once_and_the_first_of_two_counts(door):
    asked = [("X-Omniserve-Tier", "sub"), ("x-omniserve-tier", "paid")]
    seen = headers_behind(httpx.get(f"{door.public_url}/v1/models", headers=asked))
    assert [value.split(",")[0] for value in seen["x-omniserve-tier"]] == ["sub"]


def test_credentials_end_at_the_front_door(door):
    credentials = {"authorization": "Bearer sk-1", "x-api-key": "k", "x-rapid-api-key": "k", "secret": "s"}
    seen = headers_behind(httpx.get(f"{door.public_url}/v1/models", headers=credentials))
    assert not set(credentials) & set(seen)


def test_every_answer_carries_the_request_id_that_the_services_saw(door):
    response = httpx.get(f"{door.public_url}/v1/models")
    assert headers_behind(response)["x-request-id"] == [response.headers["x-request-id"]]


def test_a_traceparent_is_passed_on_and_returned(door):
    sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = httpx.get(f"{door.public_url}/v1/models", headers={"traceparent": sent})
    assert headers_behind(response)["traceparent"] == [sent]
    assert response.headers["traceparent"] == sent


@pytest.mark.parametrize(
    "path",
    [
        "/admin",
        "/admin/hold",
        "/v1/../admin/hold",
        "//admin//hold",
        "/adm%69n/hold",
        "/v1/gpu/lease",
        "/v1/host/memory",
    ],
)
def test_operator_paths_are_not_there_for_the_public(door, path):
    status = raw_status(
        door.public_target, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    )
    assert status.startswith("HTTP/1.1 404")


@pytest.mark.parametrize("path", ["/v1%2fmodels", "/v1/..%2f..%2fadmin/hold", "/v1%5cmodels", "/v1/%2e%2e%2fadmin"])
def test_escaped_slashes_are_refused(door, path):
    response = httpx.get(httpx.URL(door.public_url, raw_path=path.encode()))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


def test_a_header_with_an_underscore_is_refused(door):
    response = httpx.get(f"{door.public_url}/v1/models", headers={"x_omniserve_listener": "operator"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_hides_a_second_request_is_refused(door):
    smuggled = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nX"
    assert raw_status(door.public_target, smuggled).startswith("HTTP/1.1 400")


def test_healthz_is_answered_by_the_door_itself(door):
    response = httpx.get(f"{door.public_url}/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_the_access_log_has_no_query_string_and_no_secret(door, wait_until):
    httpx.get(f"{door.public_url}/v1/logged?secret=hunter2", headers={"authorization": "Bearer hunter2"})
    wait_until(lambda: any(entry["path"] == "/v1/logged" for entry in door.access_log()), "the access log entry")
    entry = next(entry for entry in door.access_log() if entry["path"] == "/v1/logged")
    assert (entry["listener"], entry["method"], entry["status"], entry["upstream"]) == ("public", "GET", 200, "facade")
    assert "hunter2" not in (door.state_dir / "logs" / "access.log").read_text()


def test_the_admin_interface_neither_stops_envoy_nor_prints_its_configuration(door):
    assert httpx.get(f"{door.admin_url}/ready").status_code == 200
    assert httpx.get(f"{door.admin_url}/config_dump").status_code != 200
    assert httpx.post(f"{door.admin_url}/quitquitquit").status_code != 200
    assert door.is_healthy()
