"""Stored responses: what may be stored, and for how long."""

import dataclasses

import pytest

from services.jobs.core.responses import (
    Bounds,
    Item,
    Response,
    Save,
    check_history,
    check_id,
    check_page,
    check_response,
    decide_save,
)
from services.kit.errors import DomainError, Reason

BOUNDS = Bounds(ttl_ms=1_000, response_bytes=100, total_bytes=250)
RESPONSE = Response("resp_1", None, b"{}", (Item("a", b'{"id":"a"}'),), 5, finished=True, expires_ms=0)


def changed(**fields) -> Response:
    return dataclasses.replace(RESPONSE, **fields)


@pytest.mark.parametrize(("asked", "decided"), [(0, 1_010), (500, 500), (9_999_999, 1_010)])
def test_a_response_lives_as_long_as_asked_and_no_longer_than_the_bound(asked, decided):
    assert check_response(changed(expires_ms=asked), BOUNDS, now_ms=10).expires_ms == decided


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"response_id": ""}, "response.response_id"),
        ({"response_id": "a b"}, "response.response_id"),
        ({"previous_id": "x" * 129}, "response.previous_response_id"),
        ({"previous_id": "resp_1"}, "response.previous_response_id"),
        ({"items": (Item("a", b""), Item("a", b""))}, "response.input_items_json[1].id"),
        ({"items": (Item("?", b""),)}, "response.input_items_json[0].id"),
        ({"json": b"x" * 101}, "response"),
        ({"expires_ms": 9}, "response.expires_unix_ms"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(fields, at_fault):
    with pytest.raises(DomainError) as refused:
        check_response(changed(**fields), BOUNDS, now_ms=10)
    assert refused.value.field == at_fault


def test_the_same_again_is_nothing_and_an_unfinished_one_is_replaced():
    assert decide_save(None, RESPONSE) is Save.INSERT
    assert decide_save(RESPONSE, RESPONSE) is Save.NOTHING
    assert decide_save(changed(finished=False), RESPONSE) is Save.REPLACE


@pytest.mark.parametrize("fields", [{"json": b"[]"}, {"items": ()}, {"previous_id": "resp_0"}, {"finished": False}])
def test_a_finished_response_does_not_change(fields):
    with pytest.raises(DomainError) as refused:
        decide_save(RESPONSE, changed(**fields))
    assert refused.value.reason is Reason.CONFLICT


def test_pages_and_histories_have_a_longest():
    assert (check_page(0), check_page(100), check_history(1_000)) == (20, 100, 1_000)
    for check, value in ((check_page, 101), (check_history, 1_001)):
        with pytest.raises(DomainError):
            check(value)
    with pytest.raises(DomainError):
        check_id("response_id", "../x")
