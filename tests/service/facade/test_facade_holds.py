"""The operator's holds: who may give them, and how they are answered."""

import pytest

from omniserve.admission.v1 import admission_pb2


@pytest.fixture
def order(mesh):
    async def give(path, body=None, *, caller="envoy-operator"):
        return await mesh.http.post(f"/admin/{path}", json=body, headers=mesh.token(caller))

    return give


async def test_a_hold_is_told_with_what_is_still_in_flight(mesh, order):
    answer = await order("hold?seconds=30&modalities=image,tts")
    assert answer.status_code == 200
    assert answer.json() == {"hold_id": "hold-1", "drained": False, "in_flight": 2}
    wanted = [admission_pb2.MODALITY_IMAGE, admission_pb2.MODALITY_TTS]
    assert mesh.admission_admin.asked == [
        admission_pb2.HoldRequest(seconds=30, modalities=wanted, wait_ms=30_000),
    ]


async def test_a_release_ends_one_hold_or_all(mesh, order):
    for body in (None, {"hold_id": "mine"}):
        answer = await order("release", body)
        assert (answer.status_code, answer.json()) == (200, {"released": True})
    assert mesh.admission_admin.asked == [
        admission_pb2.ReleaseHoldRequest(),
        admission_pb2.ReleaseHoldRequest(hold_id="mine"),
    ]


@pytest.mark.parametrize("path", ["hold?seconds=5", "release"])
async def test_the_public_door_has_no_such_route(mesh, order, path):
    answer = await order(path, caller="envoy-public")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "not_found")
    assert mesh.admission_admin.asked == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("hold", None, "seconds"),
        ("hold?seconds=0", None, "seconds"),
        ("hold", {"seconds": 5, "modalities": ["smell"]}, "modalities[0]"),
        ("hold", [], "body"),
        ("release", {"seconds": 5}, "seconds"),
    ],
)
async def test_a_bad_field_is_named(mesh, order, path, body, field):
    answer = await order(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert mesh.admission_admin.asked == []


async def test_a_pool_that_is_not_there_is_a_404_that_names_it(order):
    answer = await order("hold", {"seconds": 5, "pool": "gpu7"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "pool")
    assert "gpu7" in answer.json()["error"]["message"]
