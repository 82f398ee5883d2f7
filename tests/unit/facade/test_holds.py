"""What a hold's query and body say."""

import pytest

from facade.translate.holds import read_hold, read_release
from omniserve.admission.v1 import admission_pb2 as pb
from services.kit.errors import DomainError, Reason


def test_the_seconds_in_the_query_are_enough():
    assert read_hold([("seconds", "30")], {}) == pb.HoldRequest(seconds=30, wait_ms=30_000)


def test_a_hold_waits_three_minutes_for_what_is_in_flight_and_never_longer_than_it_lasts():
    assert read_hold([("seconds", "3600")], {}).wait_ms == 180_000
    assert read_hold([], {"seconds": 20, "wait_ms": 60_000}).wait_ms == 20_000
    assert read_hold([], {"seconds": 20, "wait_ms": 0}).wait_ms == 0


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ([("seconds", "5"), ("modalities", "image,3d"), ("pool", "gpu1")], {}),
        ([("seconds", "5")], {"modalities": ["image", "three_d"], "pool": "gpu1"}),
        ([], {"seconds": 5, "modalities": ["image", "3d"], "pool": "gpu1"}),
    ],
)
def test_query_and_body_say_the_same(query, body):
    assert read_hold(query, body) == pb.HoldRequest(
        seconds=5, pool="gpu1", modalities=[pb.MODALITY_IMAGE, pb.MODALITY_THREE_D], wait_ms=5_000
    )


def test_everything_that_a_body_can_say_is_said():
    body = {"seconds": 5, "reason": "a swap", "hold_id": "mine", "wait_ms": 10, "exclude_permits": ["3-7"]}
    assert read_hold([], body) == pb.HoldRequest(
        seconds=5, reason="a swap", hold_id="mine", wait_ms=10, exclude_permits=["3-7"]
    )


@pytest.mark.parametrize(
    ("query", "body", "field"),
    [
        ([], {}, "seconds"),
        ([("seconds", "")], {}, "seconds"),
        ([("seconds", "soon")], {}, "seconds"),
        ([("seconds", "-1")], {}, "seconds"),
        ([("seconds", "0")], {}, "seconds"),
        ([("seconds", "3601")], {}, "seconds"),
        ([("seconds", "5"), ("seconds", "6")], {}, "seconds"),
        ([("seconds", "5")], {"seconds": 5}, "seconds"),
        ([], {"seconds": 5.0}, "seconds"),
        ([], {"seconds": True}, "seconds"),
        ([("seconds", "5"), ("modalities", "")], {}, "modalities[0]"),
        ([("seconds", "5"), ("modalities", "image,smell")], {}, "modalities[1]"),
        ([], {"seconds": 5, "modalities": []}, "modalities"),
        ([], {"seconds": 5, "modalities": "image"}, "modalities"),
        ([], {"seconds": 5, "pool": ""}, "pool"),
        ([], {"seconds": 5, "wait_ms": -1}, "wait_ms"),
        ([], {"seconds": 5, "hold_id": "x" * 129}, "hold_id"),
        ([], {"seconds": 5, "exclude_permits": [1]}, "exclude_permits[0]"),
        ([("second", "5")], {}, "second"),
    ],
)
def test_what_is_wrong_is_named(query, body, field):
    with pytest.raises(DomainError) as caught:
        read_hold(query, body)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_REQUEST, field)


def test_a_release_names_one_hold_or_means_all():
    assert not read_release([], {}).HasField("hold_id")
    assert read_release([("hold_id", "mine")], {}).hold_id == "mine"
    assert read_release([], {"hold_id": "mine"}).hold_id == "mine"
    with pytest.raises(DomainError, match="seconds"):
        read_release([("seconds", "5")], {})
