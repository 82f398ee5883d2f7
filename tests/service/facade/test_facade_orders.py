"""The operator's orders about models: bodies, field names, and who may give them."""

from functools import partial

import pytest

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

ORDERS = ("load", "unload", "swap")


async def give(mesh, name, body=None, *, caller="envoy-operator"):
    return await mesh.http.post(f"/admin/llm/{name}", json=body, headers=mesh.token(caller))


@pytest.fixture
def order(mesh):
    return partial(give, mesh)


async def test_a_swap_takes_the_seeds_body(mesh, order):
    answer = await order("swap", {"path": "m.gguf", "ngl": 20, "ctx": 4096, "contexts": 2})
    assert answer.status_code == 200
    assert answer.json()["id"] == "tiny"
    assert mesh.llm_admin.orders == [
        llm_pb2.SwapModelRequest(path="m.gguf", gpu_layers=20, context_tokens=4096, slots=2)
    ]


async def test_automatic_layers_are_those_nobody_named(mesh, order):
    for body in ({"path": "m.gguf", "ngl": "auto"}, {"path": "m.gguf", "ngl": None}):
        assert (await order("swap", body)).status_code == 200
    assert mesh.llm_admin.orders == [llm_pb2.SwapModelRequest(path="m.gguf")] * 2


async def test_loads_and_unloads_mean_the_default_model_unless_they_name_one(mesh, order):
    assert (await order("load")).status_code == 200
    assert (await order("unload", {})).status_code == 200
    assert (await order("load", {"model": "m"})).status_code == 200
    assert (await order("unload", {"model": "m", "wait_ms": 0})).status_code == 200
    assert mesh.llm_admin.orders == [
        llm_pb2.LoadModelRequest(),
        llm_pb2.UnloadModelRequest(),
        llm_pb2.LoadModelRequest(model="m"),
        llm_pb2.UnloadModelRequest(model="m", wait_ms=0),
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ORDERS)
async def test_the_public_door_has_no_such_route(shared_mesh, name):
    answer = await give(shared_mesh, name, {"path": "m.gguf"} if name == "swap" else {}, caller="envoy-public")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "not_found")
    assert shared_mesh.llm_admin.orders == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("swap", {}, "path"),
        ("swap", {"path": ""}, "path"),
        ("swap", {"path": 1}, "path"),
        ("swap", {"path": "x" * 4097}, "path"),
        ("swap", {"path": "m", "ngl": "all"}, "ngl"),
        ("swap", {"path": "m", "ngl": True}, "ngl"),
        ("swap", {"path": "m", "ngl": -2}, "ngl"),
        ("swap", {"path": "m", "ctx": 0}, "ctx"),
        ("swap", {"path": "m", "ctx": 1.5}, "ctx"),
        ("swap", {"path": "m", "contexts": 2**31}, "contexts"),
        ("swap", {"path": "m", "layers": 1}, "layers"),
        ("load", {"model": ""}, "model"),
        ("load", {"path": "m"}, "path"),
        ("unload", {"wait_ms": -1}, "wait_ms"),
        ("unload", [], "body"),
    ],
)
async def test_a_bad_field_is_named(shared_mesh, name, body, field):
    answer = await give(shared_mesh, name, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert shared_mesh.llm_admin.orders == []


@pytest.mark.parametrize(
    ("refusal", "status", "field"),
    [
        (DomainError(Reason.INVALID_REQUEST, "'slots' is 129; 1 to 128 is allowed", field="slots"), 400, "contexts"),
        (DomainError(Reason.INVALID_REQUEST, "'context_tokens' is 10", field="context_tokens"), 400, "ctx"),
        (DomainError(Reason.NOT_FOUND, "there is no file 'm'", field="path"), 404, "path"),
        (DomainError(Reason.ENGINE_FAILED, "the model 'm' cannot be loaded"), 500, None),
        (DomainError(Reason.NO_CAPACITY, "'m' needs 9 MiB"), 503, None),
    ],
)
async def test_refusals_speak_of_the_body_s_own_fields(mesh, order, refusal, status, field):
    mesh.llm_admin.refusal = refusal
    answer = await order("swap", {"path": "m"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["reason"]) == (status, field, refusal.reason.value)
    if field == "contexts":
        assert error["message"].startswith("'contexts' is 129")


async def test_running_answers_that_outlast_the_wait_are_told_in_llm_s_own_words(mesh, order):
    message = "2 requests still run on 'm' after 1 s"
    mesh.llm_admin.refusal = DomainError(Reason.UPSTREAM_TIMEOUT, message, field="wait_ms", retry_after_ms=2_000)
    answer = await order("unload", {"wait_ms": 1000})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (504, message, "wait_ms")
    assert answer.headers["retry-after"] == "2"
