"""Pictures as events: what is sent when, and how a stream ends when something breaks."""

import asyncio
import base64
from contextlib import asynccontextmanager

import openai
import orjson
import pytest

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from services.kit.errors import DomainError, Reason

PATH = "/v1/images/generations"


@pytest.fixture
def stream():
    """Return `stream(mesh, **fields)`: a context manager that gives the lines of a stream once its headers are there."""

    @asynccontextmanager
    async def opened(mesh, **fields):
        body = {"prompt": "a fox", "stream": True, **fields}
        async with mesh.http.stream("POST", PATH, json=body) as response:
            assert response.status_code == 200
            yield response.aiter_lines()

    return opened


async def events_of(lines):
    """Return the events to the end, each with the name of its line."""
    found, name = [], ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append((name, orjson.loads(line.removeprefix("data: "))))
    return found


async def next_line(lines):
    async with asyncio.timeout(20):
        while not (line := await anext(lines)):
            pass
        return line


async def test_previews_come_first_and_the_picture_last(mesh, stream):
    async with stream(mesh, partial_images=2) as lines:
        events = await events_of(lines)
    assert [name for name, _ in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert all(told["type"] == name for name, told in events)
    first, second, last = [told for _, told in events]
    assert [first["partial_image_index"], second["partial_image_index"]] == [0, 1]
    assert base64.b64decode(last["b64_json"]) == b"picture 0"
    assert last["usage"]["input_tokens"] == 6
    assert (last["omniserve"]["seed"], last["omniserve"]["model"]) == (5, "painter")


async def test_the_steps_are_comments(mesh, stream):
    mesh.diffusion.by_hand = True

    async def draw():
        drawing = await mesh.diffusion.started()
        drawing.step(1)
        return drawing

    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(draw())
        async with stream(mesh) as lines:
            assert await next_line(lines) == ": denoising 1/4"
            drawing = await starting
            drawing.step(2)
            assert await next_line(lines) == ": denoising 2/4"
            drawing.step(1, 1, pb.PHASE_DECODING)
            assert await next_line(lines) == ": decoding 1/1"
            drawing.picture()
            drawing.finish()
            assert [name for name, _ in await events_of(lines)] == ["image_generation.completed"]


async def test_a_stream_that_waits_sends_its_headers_and_comments(open_mesh, stream):
    async with open_mesh(headers_after_s=0.05) as mesh:
        mesh.diffusion.by_hand = True

        async def queue():
            drawing = await mesh.diffusion.started()
            drawing.say(queued=pb.Queued(position=3))
            return drawing

        async with asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(queue())
            async with stream(mesh) as lines:
                assert [await next_line(lines), await next_line(lines)] == [": queued 3"] * 2
                drawing = await starting
                drawing.say(loading=pb.Loading(model="painter", progress=0.5))
                while (line := await next_line(lines)) == ": queued 3":
                    pass
                assert line == ": loading 0.50"
                drawing.picture()
                drawing.finish()
                assert len(await events_of(lines)) == 1


@pytest.mark.parametrize("how", ["an error", "no end", "a picture too few"])
async def test_a_stream_that_breaks_ends_with_an_error_and_never_with_its_last_picture(mesh, stream, how):
    mesh.diffusion.by_hand = True

    async def draw():
        drawing = await mesh.diffusion.started()
        drawing.step(1)
        drawing.picture(0)
        if how == "an error":
            drawing.picture(1)
            drawing.refuse(DomainError(Reason.ENGINE_FAILED, "the engine died"))
        elif how == "no end":
            drawing.picture(1)
            drawing.cut()
        else:
            drawing.finish()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(draw())
        async with stream(mesh, n=2) as lines:
            *_, (name, told) = events = await events_of(lines)
    assert len([each for each, _ in events if each == "image_generation.completed"]) < 2
    assert (name, told["error"]["reason"], told["error"]["status"]) == ("error", "engine_failed", 500)


async def test_a_caller_who_leaves_a_stream_ends_the_drawing(mesh, stream):
    mesh.diffusion.by_hand = True

    async def begin():
        drawing = await mesh.diffusion.started()
        drawing.step(1)
        return drawing

    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(begin())
        async with stream(mesh) as lines:
            await next_line(lines)
        drawing = await starting
    async with asyncio.timeout(20):
        await drawing.ended.wait()


@pytest.fixture
async def client(mesh):
    headers = mesh.token("envoy-public")
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, default_headers=headers, timeout=30
    ) as opened:
        yield opened


async def test_the_sdk_reads_pictures_edits_and_streams(mesh, client):
    made = await client.images.generate(prompt="a fox", n=2, extra_body={"seed": 5, "steps": 4})
    assert [base64.b64decode(each.b64_json) for each in made.data] == [b"picture 0", b"picture 1"]
    edited = await client.images.edit(image=[b"first", b"second"], mask=b"mask", prompt="a hat")
    assert base64.b64decode(edited.data[0].b64_json) == b"picture 0"
    with pytest.warns(DeprecationWarning, match="deprecated"):  # of the SDK: no model of OpenAI's own has them any more
        varied = await client.images.create_variation(image=b"first")
    assert len(varied.data) == 1
    making = await client.images.generate(prompt="a fox", stream=True, partial_images=1)
    editing = await client.images.edit(image=b"first", prompt="a hat", stream=True)
    kinds = [event.type for events in (making, editing) for event in [each async for each in events]]
    assert kinds == ["image_generation.partial_image", "image_generation.completed", "image_edit.completed"]
    edit = next(each for each in mesh.diffusion.asked if hasattr(each, "mask"))
    assert ([each.encoded for each in edit.images], edit.mask.encoded) == ([b"first", b"second"], b"mask")


async def test_the_sdk_raises_when_a_stream_breaks(mesh, client):
    mesh.diffusion.by_hand = True

    async def read():
        async for _ in await client.images.generate(prompt="a fox", stream=True):
            pass

    reading = asyncio.ensure_future(read())
    drawing = await mesh.diffusion.started()
    drawing.step(1)
    drawing.refuse(DomainError(Reason.ENGINE_FAILED, "the engine died"))
    with pytest.raises(openai.APIError) as broken:
        await reading
    assert broken.value.code == "engine_failed"


async def test_the_answers_conform(mesh, stream, check_openai):
    check_openai("ImagesResponse", (await mesh.http.post(PATH, json={"prompt": "x", "n": 2})).json())
    async with stream(mesh, partial_images=1) as lines:
        partial, completed = [told for _, told in await events_of(lines)]
    check_openai("ImageGenPartialImageEvent", partial)
    check_openai("ImageGenCompletedEvent", completed)
    body = {"prompt": "x", "images": [{"image_url": "data:image/png;base64,AAAA"}], "stream": True, "partial_images": 1}
    async with mesh.http.stream("POST", "/v1/images/edits", json=body) as response:
        partial, completed = [told for _, told in await events_of(response.aiter_lines())]
    check_openai("ImageEditPartialImageEvent", partial)
    check_openai("ImageEditCompletedEvent", completed)
