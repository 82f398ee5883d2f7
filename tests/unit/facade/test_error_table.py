"""The one table from reasons to HTTP."""

import json

import pytest

from facade.errors import HTTP, error_response, late_error_object
from services.kit.errors import STATUS, DomainError, Reason


def test_every_reason_has_a_status():
    assert set(HTTP) == set(Reason) == set(STATUS)


@pytest.mark.parametrize("reason", [reason for reason in Reason if HTTP[reason].status in (429, 503)])
def test_who_may_come_back_is_told_when(reason):
    response = error_response(DomainError(reason, "busy"), "id", "/v1/x")
    assert int(response.headers["retry-after"]) >= 1
    assert json.loads(response.body)["error"]["retry_after_ms"] >= 1


def test_the_wait_is_rounded_up_to_whole_seconds():
    response = error_response(DomainError(Reason.QUEUE_FULL, "busy", retry_after_ms=1001), "id", "/v1/x")
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("reason", [Reason.INVALID_REQUEST, Reason.ENGINE_FAILED, Reason.NOT_FOUND])
def test_where_waiting_does_not_help_no_wait_is_told(reason):
    assert "retry-after" not in error_response(DomainError(reason, "no"), "id", "/v1/x").headers


def test_an_error_event_carries_the_status_that_the_headers_could_not():
    error = DomainError(Reason.ENGINE_FAILED, "the engine died", metadata={"code": "boom"})
    assert late_error_object(error, "id")["error"] == {
        "message": "the engine died",
        "type": "server_error",
        "param": None,
        "code": "boom",
        "reason": "engine_failed",
        "request_id": "id",
        "status": 500,
    }


def test_callers_of_anthropics_routes_get_their_own_shape():
    told = json.loads(error_response(DomainError(Reason.NOT_FOUND, "no"), "id", "/v1/messages").body)
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "not_found_error", "id")
