"""Forward: which path, which headers, and what is refused before anything is sent."""

import json

import pytest

from services.kit.errors import DomainError, Reason
from services.relay.core.addresses import parse_address
from services.relay.core.forwarding import MIB, outgoing, passed_on, refusal
from services.relay.core.model import Group, GroupKind, RelayInputs, RouteSpec, Upstream
from services.relay.core.planning import plan

SPECS = (
    RouteSpec("tts.speech", "POST", "/v1/audio/speech", "tts", "tts"),
    RouteSpec("tts.voices", "GET", "/v1/voices/*", "tts", "tts"),
    RouteSpec("tts.engine", "*", "/v1/engines/{engine}/speech", "tts", "tts"),
    RouteSpec("stt.file", "POST", "/file", "stt", "stt", enabling_setting="OMNISERVE_STT_UPSTREAM"),
    RouteSpec("llm.chat", "POST", "/chat", "llm", "llm", embedded=True),
)
TTS = Upstream("tts", "tts", (Group(GroupKind.LOCAL, (parse_address("http://127.0.0.1:1"),)),), max_body_mib=2)
PLAN = {each.spec.route_id: each for each in plan(RelayInputs({"tts": TTS}), SPECS)}


def made(route="tts.speech", query="", path_rest="", headers=(), body_bytes=None):
    return outgoing(PLAN[route], query=query, path_rest=path_rest, headers=headers, body_bytes=body_bytes)


def refused(**asked):
    with pytest.raises(DomainError) as caught:
        made(**asked)
    return caught.value.reason, caught.value.field


def test_a_request_goes_to_the_routes_public_path():
    found = made(query="voice=calm&n=1", headers=[("content-type", "application/json")], body_bytes=5)
    assert (found.method, found.target) == ("POST", "/v1/audio/speech?voice=calm&n=1")
    assert found.headers == (("content-type", "application/json"),)
    assert (found.limit_bytes, found.body_bytes) == (2 * MIB, 5)


def test_an_open_path_is_filled_in():
    assert made(route="tts.voices", path_rest="a/b%20c").target == "/v1/voices/a/b%20c"
    assert made(route="tts.voices", path_rest="/a").target == "/v1/voices/a"
    assert (made(route="tts.engine", path_rest="e-1").target, made(route="tts.engine", path_rest="e").method) == (
        "/v1/engines/e-1/speech",
        "POST",
    )


@pytest.mark.parametrize(
    ("route", "rest"),
    [
        *(("tts.voices", rest) for rest in ("..", "a/../b", "a//b", "a?b", "a#b", "a b", "a\n", "http://x/")),
        *(("tts.engine", rest) for rest in ("", "a/b", "..")),
        ("tts.speech", "x"),
    ],
)
def test_a_rest_that_would_lead_elsewhere_is_refused(route, rest):
    assert refused(route=route, path_rest=rest) == (Reason.INVALID_REQUEST, "head.path_rest")


@pytest.mark.parametrize("query", ["a b", "a#b", "a\r\nx: y", "ä"])
def test_a_query_that_is_none_is_refused(query):
    assert refused(query=query) == (Reason.INVALID_REQUEST, "head.query")


@pytest.mark.parametrize(
    "name",
    [
        *("authorization", "x-api-key", "x-rapid-api-key", "secret", "cookie", "proxy-authorization"),
        *("connection", "transfer-encoding", "te", "upgrade", "host", "content-length", "expect", "x-request-id"),
        *("x-omniserve-tier", "x-omniserve-service-token", "x-om-service-token", "x-envoy-retry-on"),
        *(":path", "X-Upper", "a b", "", "a:b", "ä"),
    ],
)
def test_headers_that_are_not_the_workers_business_are_refused(name):
    assert refused(headers=[(name, "x")]) == (Reason.INVALID_REQUEST, "head.headers")


@pytest.mark.parametrize("value", ["a\r\nx-omniserve-tier: paid", "a\nb", "a\0b"])
def test_a_value_that_would_begin_another_header_is_refused(value):
    assert refused(headers=[("x-note", value)]) == (Reason.INVALID_REQUEST, "head.headers")


def test_a_body_that_is_declared_too_large_is_refused_with_both_numbers():
    made(body_bytes=2 * MIB)
    with pytest.raises(DomainError, match="2097153 bytes or more; the route takes 2 MiB") as caught:
        made(body_bytes=2 * MIB + 1)
    assert caught.value.reason is Reason.TOO_LARGE


def test_a_route_that_nothing_serves_names_its_setting():
    with pytest.raises(DomainError, match="set OMNISERVE_STT_UPSTREAM to enable it") as caught:
        made(route="stt.file")
    assert caught.value.reason is Reason.NOT_FOUND


def test_a_route_of_the_mesh_itself_is_called_directly():
    assert refused(route="llm.chat") == (Reason.NOT_FOUND, "head.route_id")


def test_a_workers_headers_are_passed_on_without_the_connections():
    headers = [("content-type", "audio/wav"), ("connection", "close"), ("transfer-encoding", "chunked"), ("x-a", "1")]
    assert passed_on(headers) == [("content-type", "audio/wav"), ("x-a", "1")]


def told(**changes):
    error = {"message": "10 of 10 wait.", "reason": "queue_full", "request_id": "r1", **changes}
    return json.dumps({"error": error}).encode()


def test_the_meshs_own_refusal_is_known_by_the_request_id_and_the_reason():
    error = refusal(told(), "r1", "3")
    assert (error.reason, error.message, error.retry_after_ms) == (Reason.QUEUE_FULL, "10 of 10 wait.", 3000)
    assert refusal(told(), "r1", "").retry_after_ms is None


@pytest.mark.parametrize(
    "body", [told(request_id="r2"), told(reason="too_hot"), b"{}", b"[]", b"no json", b'{"error": "x"}', b"\xff"]
)
def test_what_a_worker_says_is_a_workers_word(body):
    assert refusal(body, "r1", "3") is None
