"""The routes of pictures over a diffusion service that does what the test says."""

import asyncio
import base64

import httpx
import pytest

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.media.v1 import media_pb2
from services.kit.errors import DomainError, Reason
from tests.fixtures.pictures import output

DATA = b"\x89PNG pixels"
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"
GENERATIONS = "/v1/images/generations"
BODIES = {
    GENERATIONS: {"prompt": "a fox"},
    "/v1/images/edits": {"prompt": "a fox", "image": URL},
    "/v1/images/variations": {"image": URL},
    "/v1/images/upscale": {"image": URL},
    "/v1/images/backgrounds": {"prompt": "a wood"},
    "/v1/images/backgrounds/style": {"prompt": "a wood", "image": URL},
}


def decoded(picture) -> bytes:
    return base64.b64decode(picture["b64_json"])


async def test_a_picture_comes_with_its_size_its_seed_and_what_it_took(mesh):
    answer = await mesh.http.post(GENERATIONS, json={"prompt": "a fox"})
    told = answer.json()
    created = told.pop("created")
    assert created > 1_700_000_000
    assert told == {
        "data": [
            {
                "b64_json": base64.b64encode(b"picture 0").decode(),
                "omniserve": {"index": 0, "seed": 5, "inference_time_ms": 30, "denoise_calls": 4},
            }
        ],
        "size": "1024x1024",
        "background": "opaque",
        "output_format": "webp",
        "usage": {
            "input_tokens": 6,
            "output_tokens": 0,
            "total_tokens": 6,
            "input_tokens_details": {"text_tokens": 6, "image_tokens": 0},
        },
        "omniserve": {
            "model": "painter",
            "inference_time_ms": 30,
            "queue_ms": 1,
            "load_ms": 0,
            "steps": 4,
            "guidance": 7.5,
            "sampler": "euler",
            "scheduler": "discrete",
        },
    }


async def test_pictures_asked_for_as_urls_are_fetched_from_the_front_door(mesh, check_openai):
    answer = await mesh.http.post(GENERATIONS, json={"prompt": "a fox", "n": 2, "response_format": "url"})
    told = answer.json()
    check_openai("ImagesResponse", told)
    assert all("b64_json" not in each for each in told["data"])
    for index, each in enumerate(told["data"]):
        path = each["url"].removeprefix("http://127.0.0.1:8791")  # the public base, whatever Host a caller claims
        fetched = await mesh.http.get(path)
        assert (fetched.status_code, fetched.content) == (200, b"picture %d" % index)
        assert fetched.headers["content-type"] == "image/webp"
        assert fetched.headers["x-content-type-options"] == "nosniff"
        other = await mesh.http.get(path, headers={"x-omniserve-client": "bob"})
        assert (other.status_code, other.json()["error"]["reason"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("", 400, "expires"),
        ("?expires=soon&signature=a", 400, "expires"),
        ("?expires=9999999999999", 400, "signature"),
        ("?expires=9999999999999&signature=a&size=3", 400, "size"),
        ("?expires=9999999999999&signature=a", 404, "image_id"),
    ],
)
async def test_a_url_that_nobody_signed_finds_nothing(mesh, query, status, param):
    answer = await mesh.http.get(f"/v1/images/files/abc{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_events_hold_pictures_and_no_urls(mesh):
    body = {"prompt": "a fox", "stream": True, "response_format": "url"}
    answer = await mesh.http.post(GENERATIONS, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


async def test_nothing_is_drawn_for_a_url_while_nobody_could_keep_it(open_mesh, free_ports):
    (port,) = free_ports(1)
    async with open_mesh(jobs_address=f"127.0.0.1:{port}", peer_wait_s=0.1) as mesh:
        answer = await mesh.http.post(GENERATIONS, json={"prompt": "a fox", "response_format": "url"})
        assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "loading")
        assert mesh.diffusion.asked == []


async def test_several_pictures_are_in_their_order_with_the_size_that_was_made(mesh):
    mesh.diffusion.by_hand = True
    asking = asyncio.ensure_future(mesh.http.post(GENERATIONS, json={"prompt": "x", "n": 2, "size": "65x70"}))
    drawing = await mesh.diffusion.started()
    made = {"width_px": 64, "height_px": 128, "channels": 4, "format": media_pb2.IMAGE_FORMAT_PNG}
    for index in (1, 0):
        drawing.picture(index, image=output(b"%d" % index, **made))
    drawing.finish()
    told = (await asking).json()
    assert [decoded(each) for each in told["data"]] == [b"0", b"1"]
    assert [each["omniserve"]["seed"] for each in told["data"]] == [5, 6]
    assert (told["size"], told["background"], told["output_format"]) == ("64x128", "transparent", "png")


async def test_a_replayed_picture_says_which_layer_served_it(mesh):
    mesh.diffusion.by_hand = True
    asking = asyncio.ensure_future(mesh.http.post(GENERATIONS, json={"prompt": "x", "n": 2, "teleport": True}))
    drawing = await mesh.diffusion.started()
    assert drawing.request.options.HasField("teleport")
    drawing.picture(0, replay=pb.REPLAY_LAYER_LATENT, resumed_at_step=3, teleport_key="ab")
    drawing.picture(1, replay=pb.REPLAY_LAYER_RESULT, teleport_key="cd")
    drawing.finish()
    latent, result = [each["omniserve"] for each in (await asking).json()["data"]]
    assert (latent["cache"], latent["resumed_at_step"], latent["teleport_key"]) == (
        "exact_prompt_latent_replay",
        3,
        "ab",
    )
    assert (result["cache"], result["teleport_key"]) == ("exact_prompt_result_cache", "cd")
    assert "resumed_at_step" not in result


@pytest.mark.parametrize("path", BODIES)
async def test_every_route_answers_with_pictures_for_its_caller(mesh, path):
    headers = {"x-omniserve-client": "alice", "x-omniserve-tier": "paid"}
    answer = await mesh.http.post(path, json=BODIES[path], headers=headers)
    assert decoded(answer.json()["data"][0]) == b"picture 0"
    # Backdrops wait for an idle device, whoever asks for them.
    tier = "background" if "backgrounds" in path else "paid"
    assert mesh.diffusion.callers == [("facade", "alice", tier)]


async def test_a_form_brings_files_a_mask_and_numbers(mesh):
    files = [
        ("image[]", ("a.png", b"first", "image/png")),
        ("image[]", ("b.webp", b"second", "image/webp")),
        ("mask", ("m.png", b"mask", "image/png")),
    ]
    fields = {"prompt": "a hat", "n": "2", "strength": "0.5", "size": "auto"}
    answer = await mesh.http.post("/v1/images/edits", data=fields, files=files)
    assert len(answer.json()["data"]) == 2
    (request,) = mesh.diffusion.asked
    assert [each.encoded for each in request.images] == [b"first", b"second"]
    assert (request.mask.encoded, request.options.n, request.strength) == (b"mask", 2, 0.5)


async def test_a_form_may_be_large(mesh):
    picture = bytes(range(256)) * 4096
    answer = await mesh.http.post("/v1/images/variations", files={"image": ("a.png", picture)})
    assert answer.status_code == 200
    assert mesh.diffusion.asked[0].image.encoded == picture


async def test_a_malformed_form_is_a_400_that_names_the_field(mesh):
    answer = await mesh.http.post("/v1/images/edits", data={"prompt": "x", "n": "two"}, files={"image": b"a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await mesh.http.post("/v1/images/edits", content=b"nonsense", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")


@pytest.mark.parametrize(
    ("path", "contract", "param"),
    [
        (GENERATIONS, "options.width_px", "size"),
        (GENERATIONS, "options.loras[0].catalogue.lora_id", "loras[0].lora_id"),
        ("/v1/images/edits", "images[0]", "image"),
        ("/v1/images/upscale", "tile_px", "tile"),
    ],
)
async def test_what_diffusion_refuses_is_told_with_the_callers_own_names(mesh, path, contract, param):
    mesh.diffusion.by_hand = True
    asking = asyncio.ensure_future(mesh.http.post(path, json=BODIES[path]))
    error = DomainError(Reason.INVALID_REQUEST, f"'{contract}' is 9; at most 8", field=contract)
    (await mesh.diffusion.started()).refuse(error)
    answer = await asking
    told = answer.json()["error"]
    assert (answer.status_code, told["param"], told["message"]) == (400, param, f"'{param}' is 9; at most 8")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DomainError(Reason.NOT_FOUND, "no picture model: set OMNISERVE_SD_MODEL"), 404),
        (DomainError(Reason.UNSUPPORTED, "no alpha", field="options.background"), 400),
        (DomainError(Reason.TOO_LARGE, "the picture has 90 megapixels; the most is 64"), 413),
        (DomainError(Reason.QUEUE_FULL, "10000 wait", retry_after_ms=4000), 429),
        (DomainError(Reason.NO_CAPACITY, "no room"), 503),
        (DomainError(Reason.ENGINE_FAILED, "the engine died"), 500),
    ],
    ids=lambda each: each.reason.value if isinstance(each, DomainError) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_keeps_its_status_and_its_words(mesh, error, status, stream):
    mesh.diffusion.by_hand = True
    asking = asyncio.ensure_future(mesh.http.post(GENERATIONS, json={"prompt": "x", "stream": stream}))
    drawing = await mesh.diffusion.started()
    drawing.say(queued=pb.Queued(position=3))
    drawing.refuse(error)
    answer = await asking
    told = answer.json()["error"]
    assert (answer.status_code, told["reason"], told["message"]) == (status, error.reason.value, error.message)
    assert answer.headers.get("retry-after") == ("4" if error.retry_after_ms else answer.headers.get("retry-after"))


MAY_LEAVE = {"x-omniserve-mode": "try"}


@pytest.mark.parametrize(
    ("error", "mark"),
    [
        (DomainError(Reason.SATURATED, "the device is taken"), "saturated"),
        (DomainError(Reason.ENGINE_FAILED, "the engine died"), "local_failed"),
        (DomainError(Reason.QUOTA_EXCEEDED, "enough for today"), None),
        (DomainError(Reason.UNSUPPORTED, "no alpha", field="options.background"), None),
    ],
    ids=lambda each: each.reason.value if isinstance(each, DomainError) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_somebody_else_may_serve_does_not_wait_and_says_so_until_its_first_output(
    open_mesh, error, mark, stream
):
    async with open_mesh(headers_after_s=0.0) as mesh:
        mesh.diffusion.by_hand = True
        body = {"prompt": "x", "stream": stream}
        asking = asyncio.ensure_future(mesh.http.post(GENERATIONS, json=body, headers=MAY_LEAVE))
        drawing = await mesh.diffusion.started()
        assert drawing.request.options.may_wait is False
        assert drawing.request.options.without_steps is not stream  # who waits for the whole hears of none
        drawing.step(1)
        drawing.refuse(error)
        answer = await asking
        assert answer.json()["error"]["reason"] == error.reason.value
        assert answer.headers.get("x-omniserve-overflow") == mark
        assert (answer.status_code == 503) is (mark is not None)


async def test_nothing_is_marked_and_all_may_wait_where_nobody_else_serves(mesh):
    mesh.diffusion.by_hand = True
    asking = asyncio.ensure_future(mesh.http.post(GENERATIONS, json={"prompt": "x"}))
    drawing = await mesh.diffusion.started()
    assert not drawing.request.options.HasField("may_wait")
    drawing.refuse(DomainError(Reason.SATURATED, "the device is taken"))
    answer = await asking
    assert (answer.status_code, "x-omniserve-overflow" in answer.headers) == (429, False)


async def test_an_unknown_model_has_openais_code(mesh):
    mesh.diffusion.by_hand = True
    asking = asyncio.ensure_future(mesh.http.post(GENERATIONS, json={"prompt": "x", "model": "dall-e-3"}))
    (await mesh.diffusion.started()).refuse(DomainError(Reason.NOT_FOUND, "no 'dall-e-3'", field="options.model"))
    told = (await asking).json()["error"]
    assert (told["param"], told["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("missing", ["the end", "a picture"])
async def test_an_answer_that_is_cut_short_is_a_failure(mesh, missing):
    mesh.diffusion.by_hand = True
    asking = asyncio.ensure_future(mesh.http.post(GENERATIONS, json={"prompt": "x", "n": 2}))
    drawing = await mesh.diffusion.started()
    drawing.picture(0)
    if missing == "the end":
        drawing.picture(1)
        drawing.cut()
    else:
        drawing.finish()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "engine_failed")


async def test_a_service_that_is_not_there_is_a_503(open_mesh, free_ports):
    (port,) = free_ports(1)
    async with open_mesh(diffusion_address=f"127.0.0.1:{port}", peer_wait_s=0.1) as mesh:
        for stream in (False, True):
            answer = await mesh.http.post(GENERATIONS, json={"prompt": "x", "stream": stream})
            assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "loading")
            assert "diffusion cannot be reached" in answer.json()["error"]["message"]


async def test_a_caller_who_hangs_up_ends_the_drawing(mesh):
    mesh.diffusion.by_hand = True
    with pytest.raises(httpx.ReadTimeout):
        await mesh.http.post(GENERATIONS, json={"prompt": "x"}, timeout=0.3)
    drawing = await mesh.diffusion.started()
    async with asyncio.timeout(20):
        await drawing.ended.wait()


async def test_only_the_operator_names_files_of_the_host(mesh):
    body = {"prompt": "x", "loras": [{"lora_id": "ink"}, {"path": "/models/own.safetensors"}]}
    answer = await mesh.http.post(GENERATIONS, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "loras[1].path")
    assert mesh.diffusion.asked == []
    answer = await mesh.http.post(GENERATIONS, json=body, headers=mesh.token("envoy-operator"))
    assert answer.status_code == 200
    assert mesh.diffusion.asked[0].options.loras[1].path == "/models/own.safetensors"


@pytest.mark.parametrize("path", BODIES)
async def test_the_routes_are_described(mesh, path):
    description = (await mesh.http.get("/openapi.json")).json()
    content = description["paths"][path]["post"]["requestBody"]["content"]
    assert "output_format" in content["application/json"]["schema"]["properties"]
    if "image" in BODIES[path]:
        assert content["multipart/form-data"]["schema"]["properties"]["image"]["format"] == "binary"
    assert path in (await mesh.http.get("/docs")).text
