"""Pictures through the front door: the official OpenAI SDK, the command line and the exactness bench on the real engine."""

import base64
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image

from bench.teleport import run as teleport
from services.diffusion.native.build import build as build_tap
from tests.fixtures.image_models import make

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"steps": 2, "seed": 7}


@pytest.fixture(scope="module")
def drawing(make_mesh, tmp_path_factory, free_ports):
    """A mesh that serves a small image model and an upscaler itself, although an upstream is set, where nobody listens."""
    folder = tmp_path_factory.mktemp("images")
    (nobody,) = free_ports(1)
    settings = {
        **make(folder / "model").settings,
        "OMNISERVE_DIFFUSION_NATIVE_TAP": str(build_tap()),
        "OMNISERVE_IMAGE_UPSTREAM": f"http://127.0.0.1:{nobody}",
        "OMNISERVE_IMAGE_PREFER_EMBEDDED": "1",
        "OMNISERVE_EMBEDDING_GGUF": "none",
    }
    with make_mesh(folder / "mesh", **settings) as mesh:
        yield mesh


@pytest.fixture
def client(drawing) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{drawing.public_url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def opened(text: str) -> Image.Image:
    picture = Image.open(io.BytesIO(base64.b64decode(text)))
    picture.load()
    return picture


def png(size: tuple[int, int], colour: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, "PNG")
    return file.getvalue()


def test_the_sdk_makes_the_same_picture_from_the_same_seed(client):
    made = client.images.generate(prompt="a fox", size="64x64", n=2, extra_body=QUICK)
    again = client.images.generate(prompt="a fox", size="64x64", extra_body={**QUICK, "seed": 8})
    first, second = made.data
    assert first.b64_json != second.b64_json
    assert second.b64_json == again.data[0].b64_json
    assert [each.omniserve["seed"] for each in made.data] == [7, 8]
    assert (opened(first.b64_json).size, opened(first.b64_json).format) == ((64, 64), "WEBP")
    assert (made.size, made.output_format) == ("64x64", "webp")


def test_a_size_the_engine_cannot_make_is_rounded_and_told(client):
    made = client.images.generate(prompt="a fox", size="65x70", output_format="png", extra_body=QUICK)
    picture = opened(made.data[0].b64_json)
    assert made.size == f"{picture.width}x{picture.height}"
    assert made.size != "65x70"
    assert picture.format == "PNG"


def test_the_sdk_streams_previews_and_the_picture(client):
    events = list(
        client.images.generate(
            prompt="a fox", size="64x64", stream=True, partial_images=1, extra_body={**QUICK, "steps": 4}
        )
    )
    assert [each.type for each in events] == ["image_generation.partial_image", "image_generation.completed"]
    assert opened(events[-1].b64_json).size == (64, 64)


def test_the_sdk_edits_a_picture(client):
    blue = png((64, 64), "blue")
    made = client.images.edit(image=blue, prompt="a hat", size="64x64", extra_body={**QUICK, "strength": 0.5})
    assert opened(made.data[0].b64_json).size == (64, 64)
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=b"no picture", prompt="a hat", extra_body=QUICK)
    assert caught.value.body["param"] == "image"


def test_the_sdk_gets_urls_that_anybody_may_fetch_at_the_front_door(client, drawing):
    made = client.images.generate(prompt="a fox", size="64x64", response_format="url", extra_body=QUICK)
    again = client.images.generate(prompt="a fox", size="64x64", response_format="b64_json", extra_body=QUICK)
    url = made.data[0].url
    assert url.startswith(f"{drawing.public_url}/v1/images/files/")
    fetched = httpx.get(url, timeout=60)
    assert (fetched.status_code, fetched.headers["content-type"]) == (200, "image/webp")
    assert fetched.content == base64.b64decode(again.data[0].b64_json)
    assert httpx.get(url[:-4], timeout=60).status_code == 404


def test_what_is_not_there_or_not_possible_is_said(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt="a fox", model="dall-e-3")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="a fox", extra_body={"sampler": "magic"})
    assert caught.value.body["param"] == "sampler"


def test_without_a_picture_model_the_refusal_names_the_setting(mesh):
    for stream in (False, True):
        body = {"prompt": "a fox", "stream": stream}
        answer = httpx.post(f"{mesh.public_url}/v1/images/generations", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "not_found")
        assert "OMNISERVE_SD_MODEL" in answer.json()["error"]["message"]


def test_a_picture_is_enlarged(drawing):
    url = f"data:image/png;base64,{base64.b64encode(png((16, 12), 'red')).decode()}"
    answer = httpx.post(f"{drawing.public_url}/v1/images/upscale", json={"image": url, "factor": 2}, timeout=300)
    assert opened(answer.json()["data"][0]["b64_json"]).size == (32, 24)


def test_the_models_are_listed(client):
    kinds = {each.id: each.omniserve["kind"] for each in client.models.list()}
    assert {"image", "upscaler"} <= set(kinds.values())


def test_the_command_writes_a_picture(drawing, tmp_path):
    environ = {**os.environ, "OMNISERVE_CLI_URL": drawing.public_url, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}"}
    command = [sys.executable, "-m", "cli.main", "image", "a fox", "-o", "fox.png", "--size", "64x64", "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "seed " in done.stdout
    with Image.open(tmp_path / "fox.png") as picture:
        assert picture.size == (64, 64)


def test_replay_is_exact(drawing, tmp_path):
    arguments = ["--base", drawing.public_url, "--samplers", "euler", "--steps", "4", "--size", "64x64"]
    assert teleport.main([*arguments, "--out", str(tmp_path / "teleport.json")]) == 0


def test_the_operator_empties_the_exact_caches(drawing):
    body = {"prompt": "a pond", "size": "64x64", **QUICK, "teleport": True}
    caches = []
    for order in (None, None, {}, None):
        if order is not None:
            path = "/admin/diffusion/teleport/clear"
            assert httpx.post(f"{drawing.public_url}{path}", json=order, timeout=60).status_code == 404
            assert httpx.post(f"{drawing.operator_url}{path}", json=order, timeout=60).json()["entries"] >= 1
            continue
        made = httpx.post(f"{drawing.public_url}/v1/images/generations", json=body, timeout=300).json()
        caches.append(made["data"][0]["omniserve"].get("cache"))
    assert caches == [None, "exact_prompt_result_cache", None]


def test_backdrops_are_drawn_and_replayed(drawing):
    body = {"prompt": "a wood", "size": "64x64", "steps": 2}
    first, second = (
        httpx.post(f"{drawing.public_url}/v1/images/backgrounds", json=body, timeout=300).json() for _ in range(2)
    )
    assert first["data"][0]["b64_json"] == second["data"][0]["b64_json"]
    assert "cache" not in first["data"][0]["omniserve"]
    assert second["data"][0]["omniserve"]["cache"].startswith("exact_prompt_")
