"""The operator's orders about pictures' exact caches."""

import pytest

from omniserve.diffusion.v1 import diffusion_pb2 as pb

PATH = "/admin/diffusion/teleport/clear"


@pytest.fixture
def clear(mesh):
    async def give(body=None, *, caller="envoy-operator"):
        return await mesh.http.post(PATH, json=body, headers=mesh.token(caller))

    return give


async def test_the_exact_caches_are_emptied_all_or_of_one_model(mesh, clear):
    answer = await clear()
    assert (answer.status_code, answer.json()) == (200, {"entries": 3, "size_bytes": 4096})
    assert (await clear({"model": "painter", "layers": ["result"]})).status_code == 200
    assert mesh.diffusion_admin.orders == [
        pb.ClearTeleportRequest(),
        pb.ClearTeleportRequest(model="painter", layers=[pb.TELEPORT_LAYER_RESULT]),
    ]


async def test_only_the_operator_s_listener_has_it(mesh, clear):
    answer = await clear({}, caller="envoy-public")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "not_found")
    assert mesh.diffusion_admin.orders == []


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"model": 1}, 400, "model"),
        ({"layers": ["all"]}, 400, "layers[0]"),
        ({"layers": "result"}, 400, "layers"),
        ({"cache": True}, 400, "cache"),
        ({"model": "absent"}, 404, "model"),
    ],
)
async def test_a_bad_order_names_its_field(clear, body, status, field):
    answer = await clear(body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
