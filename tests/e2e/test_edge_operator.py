"""The operator listener is for the owner of the box: no web page drives it, and it trusts by listener alone."""

import httpx
import pytest

pytestmark = pytest.mark.e2e

JSON = {"content-type": "application/json"}


def test_a_call_arrives_with_the_operators_trust(door):
    response = httpx.post(f"{door.operator_url}/admin/hold?seconds=5", headers=JSON, content=b"{}")
    assert response.status_code == 200
    seen = dict(response.json()["headers"])
    assert seen["x-omniserve-listener"] == "operator"
    assert seen["x-omniserve-service-token"] == door.token("envoy-operator")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "localhost:1234"])
def test_loopback_names_are_allowed_as_host(door, host):
    assert httpx.get(f"{door.operator_url}/status", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8792"]
)
def test_a_rebound_name_is_refused(door, host):
    response = httpx.get(f"{door.operator_url}/status", headers={"host": host})
    assert response.status_code == 403
    assert response.json()["error"]["reason"] == "forbidden"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:3000", "https://127.0.0.1.evil.example"]
)
def test_a_foreign_origin_is_refused(door, origin):
    for method in ("GET", "POST", "OPTIONS"):
        response = httpx.request(method, f"{door.operator_url}/status", headers={**JSON, "origin": origin})
        assert response.status_code == 403


def test_the_listeners_own_origin_is_allowed(door):
    response = httpx.post(f"{door.operator_url}/admin/hold", headers={**JSON, "origin": door.operator_url})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_write_needs_json(door, method, kind):
    headers = {} if kind is None else {"content-type": kind}
    response = httpx.request(method, f"{door.operator_url}/admin/release", headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_may_carry_parameters(door, kind):
    assert httpx.post(f"{door.operator_url}/admin/release", headers={"content-type": kind}).status_code == 200


def test_spoofed_headers_vanish_here_too(door):
    spoofed = {"x-omniserve-listener": "public", "x-omniserve-client": "somebody"}
    seen = dict(httpx.get(f"{door.operator_url}/status", headers=spoofed).json()["headers"])
    assert (seen["x-omniserve-listener"], seen["x-omniserve-client"]) == ("operator", "operator")
