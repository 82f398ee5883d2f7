"""What `omniserve image` makes of a stream."""

import base64
import json
from pathlib import Path

import pytest

from cli.errors import CliError, Exit
from cli.image.reader import Picture, PictureReader, Preview, Step, Waiting
from cli.image.run import Asked, numbered, request_body
from cli.sse import SseComment, SseEvent


def event(kind: str, **fields: object) -> SseEvent:
    told = {"type": f"image_generation.{kind}", "b64_json": base64.b64encode(b"1234").decode(), "size": "64x32"}
    return SseEvent(json.dumps({**told, **fields}), f"image_generation.{kind}")


def asked(**changes: object) -> Asked:
    fields = {"prompt": "a fox", "output": Path("fox.webp"), "pictures": 1, "previews": 2, "fields": {}}
    return Asked(**{**fields, **changes})


@pytest.mark.parametrize(
    ("comment", "told"),
    [
        ("queued 3", Waiting("queued, place 3")),
        ("loading 0.50", Waiting("loading the model")),
        ("loading", Waiting("loading the model")),
        ("preparing", Waiting("reading the prompt")),
        ("denoising 3/20", Step("denoising", 3, 20)),
        ("decoding 1/1", Step("decoding", 1, 1)),
        ("ping", None),
        ("", None),
    ],
)
def test_comments_tell_what_is_waited_for_and_how_far_it_is(comment, told):
    assert PictureReader(1).read(SseComment(comment)) == told


def test_previews_and_pictures_are_told_with_their_size():
    reader = PictureReader(1)
    assert reader.read(event("partial_image", partial_image_index=1)) == Preview(2, "64x32", 4)
    ours = {"seed": 7, "inference_time_ms": 1500, "cache": "exact_prompt_result_cache"}
    picture = reader.read(event("completed", omniserve=ours))
    assert picture == Picture(b"1234", "64x32", 7, 1500, "exact_prompt_result_cache")
    reader.finish()


def test_a_server_that_tells_no_seed_is_fine():
    assert PictureReader(1).read(event("completed")) == Picture(b"1234", "64x32", None, None, "")


def test_a_stream_that_ends_early_is_no_answer():
    reader = PictureReader(2)
    reader.read(event("completed"))
    with pytest.raises(CliError, match="1 of 2 pictures"):
        reader.finish()


@pytest.mark.parametrize(
    "item",
    [
        SseEvent('{"error": {"message": "the engine died", "reason": "engine_failed"}}', "error"),
        SseEvent("[DONE", "message"),
        SseEvent("[]", "message"),
        event("completed", b64_json="!"),
    ],
)
def test_errors_and_nonsense_are_one_line(item):
    with pytest.raises(CliError):
        PictureReader(1).read(item)


def test_nothing_is_asked_for_that_was_not_given():
    body = request_body(asked(fields={"seed": 0, "steps": None}))
    assert body == {"prompt": "a fox", "stream": True, "partial_images": 2, "output_format": "webp", "seed": 0}
    assert request_body(asked(output=Path("a.JPG"), pictures=2))["output_format"] == "jpeg"


@pytest.mark.parametrize("changes", [{"output": Path("fox")}, {"output": Path("fox.gif")}, {"prompt": " "}])
def test_what_cannot_be_asked_for_is_a_mistake_on_the_command_line(changes):
    with pytest.raises(CliError) as raised:
        request_body(asked(**changes))
    assert raised.value.code is Exit.USAGE


def test_several_pictures_get_numbers():
    assert numbered(Path("a/fox.webp"), 2, 3) == Path("a/fox-2.webp")
    assert numbered(Path("a/fox.webp"), 1, 1) == Path("a/fox.webp")
