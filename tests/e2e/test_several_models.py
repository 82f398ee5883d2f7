"""Several models behind the front door: the official OpenAI SDK asks for them by name, the operator moves them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from services.llm.adapters.model_file import default_path
from tests.fixtures.gguf_files import cut

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def mesh(make_mesh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    swaps = folder / "swaps"
    swaps.mkdir()
    cut(default_path(), swaps / "draft.gguf", 4)
    (swaps / "broken.gguf").write_bytes(b"GGUF")
    model = {"path": str(default_path()), "ctx": 1024, "system": "Answer questions correctly."}
    models = [{"name": "big", "aliases": ["gpt-4o"], "preload": True, **model}, {"name": "twin", **model}]
    (folder / "omniserve.yaml").write_text(yaml.safe_dump({"models": models}))
    with make_mesh(
        folder / "run",
        OMNISERVE_CONFIG=str(folder / "omniserve.yaml"),
        OMNISERVE_EMBEDDING_GGUF="none",
        OMNISERVE_LLM_MEMORY_MIB="200",
        OMNISERVE_LLM_TURN_S="1",
        OMNISERVE_LLM_SWAP_DIR=str(swaps),
    ) as running:
        yield running


@pytest.fixture
def client(mesh):
    with openai.OpenAI(base_url=f"{mesh.public_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


OURS = ("big", "twin")  # a mesh may serve an embedding model beside them


def states(client) -> dict[str, str]:
    return {model.id: model.omniserve["state"] for model in client.models.list().data if model.id in OURS}


def answer(client, model: str, *, stream: bool = False) -> str:
    asked = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=16, stream=stream)
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in asked if chunk.choices)
    return asked.choices[0].message.content


def order(mesh, name: str, body: dict) -> httpx.Response:
    return httpx.post(f"{mesh.operator_url}/admin/llm/{name}", json=body, timeout=120)


def omniserve(mesh, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, **mesh.environ, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_all_models_are_listed_and_each_answers_although_they_do_not_fit_together(client):
    assert states(client) == {"big": "ready", "twin": "available"}
    asked = ["big", "twin", "gpt-4o", "twin"] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: answer(client, each[1], stream=each[0] % 2 == 0), enumerate(asked)))
    assert all("Paris" in text for text in answers)


def test_a_model_that_is_not_in_the_catalogue_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        answer(client, "gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_the_operator_unloads_and_loads_and_status_has_an_engine_for_each_that_runs(mesh, client):
    assert order(mesh, "load", {"model": "twin"}).json()["omniserve"]["state"] == "ready"
    assert [each["model"] for each in engines(mesh)] == ["twin"]
    assert order(mesh, "unload", {"model": "twin"}).json()["omniserve"]["state"] == "available"
    assert engines(mesh) == []
    assert httpx.get(f"{mesh.public_url}/readyz", timeout=60).status_code == 200, "unloaded on purpose is no failure"
    assert "Paris" in answer(client, "gpt-4o")
    assert order(mesh, "load", {"model": "nobody"}).json()["error"]["code"] == "model_not_found"


def engines(mesh) -> list[dict]:
    told = httpx.get(f"{mesh.operator_url}/status", timeout=60).json()["services"]["llm"]["engines"]
    return [each for each in told if each["model"] in OURS]


def test_orders_are_the_operator_s_alone(mesh):
    for name in ("load", "unload", "swap"):
        refused = httpx.post(f"{mesh.public_url}/admin/llm/{name}", json={"path": "draft.gguf"}, timeout=60)
        assert refused.status_code == 404


def test_the_command_line_moves_models(mesh):
    done = omniserve(mesh, "models", "unload", "big", "--wait", "30")
    assert (done.returncode, done.stderr) == (0, "")
    assert " available " in done.stdout
    done = omniserve(mesh, "models", "load", "gpt-4o")
    assert " ready " in done.stdout
    listed = json.loads(omniserve(mesh, "models", "list", "--json").stdout)
    # Models of pictures tell no memory.
    assert {each["id"] for each in listed if each["omniserve"].get("memory_mib", 0) > 100} == {*OURS}
    done = omniserve(mesh, "models", "swap", "../omniserve.yaml")
    assert done.returncode == 1
    assert "leads out of it" in done.stderr
    done = omniserve(mesh, "models", "swap", "broken.gguf")
    assert done.returncode == 1
    assert "truncated" in done.stderr
    done = omniserve(mesh, "models", "swap", "draft.gguf", "--ctx", "512", "--contexts", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "big" in done.stdout
    assert " 512 " in done.stdout
    (engine,) = [each for each in engines(mesh) if each["model"] == "big"]
    assert (engine["slots"], engine["kv_cells"]) == (2, 512)
