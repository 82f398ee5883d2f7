"""Requests for pictures: what they become, and how they are refused."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facade.translate import image_requests as requests
from facade.translate.image_requests import (
    Method,
    read_background,
    read_background_style,
    read_edit,
    read_generation,
    read_upscale,
    read_variation,
)
from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.media.v1 import media_pb2
from services.kit.errors import DomainError, Reason

DATA = b"\x89PNG pixels"
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"
READERS = {
    "generation": (read_generation, {"prompt": "a fox"}),
    "edit": (read_edit, {"prompt": "a fox", "image": URL}),
    "variation": (read_variation, {"image": URL}),
    "upscale": (read_upscale, {"image": URL}),
    "background": (read_background, {"prompt": "a wood"}),
    "style": (read_background_style, {"prompt": "a wood", "image": URL}),
}


def refused(read, body) -> DomainError:
    with pytest.raises(DomainError) as raised:
        read(body)
    return raised.value


def outcome(read, body):
    """Return what was read, or the refusal."""
    try:
        return read(body)
    except DomainError as error:
        return error


def test_a_prompt_alone_leaves_everything_to_the_model():
    call = read_generation({"prompt": "a fox"})
    assert call.method is Method.GENERATE
    assert (call.pictures, call.stream) == (1, False)
    assert call.request == pb.GenerateImageRequest(
        prompt="a fox", options=pb.ImageOptions(background=pb.BACKGROUND_AUTO)
    )


def test_every_option_reaches_the_engine_as_it_was_given():
    body = {
        "prompt": "a fox",
        "model": "painter",
        "negative_prompt": "dogs",
        "size": "640x384",
        "steps": 20,
        "guidance": 0,
        "distilled_guidance": 3.5,
        "sampler": "euler_a",
        "scheduler": "karras",
        "seed": 2**40,
        "n": 3,
        "teleport": {"start_step": 6},
        "background": "opaque",
        "clip_skip": 2,
        "eta": 0.5,
        "flow_shift": 3,
        "vae_tiling": True,
        "stream": True,
        "partial_images": 2,
        "output_format": "webp",
        "output_compression": 80,
        "output_effort": 6,
        "embed_parameters": False,
        "response_format": "b64_json",
    }
    call = read_generation(body)
    assert (call.pictures, call.stream) == (3, True)
    assert call.request.options == pb.ImageOptions(
        model="painter",
        negative_prompt="dogs",
        width_px=640,
        height_px=384,
        steps=20,
        guidance=0,
        distilled_guidance=3.5,
        sampler="euler_a",
        scheduler="karras",
        seed=2**40,
        n=3,
        teleport=pb.Teleport(start_step=6),
        background=pb.BACKGROUND_OPAQUE,
        clip_skip=2,
        eta=0.5,
        flow_shift=3,
        vae_tiling=True,
        partial_images=2,
        encoding=media_pb2.ImageEncoding(
            format=media_pb2.IMAGE_FORMAT_WEBP, quality=80, effort=6, embed_parameters=False
        ),
    )


@pytest.mark.parametrize("size", [None, "auto"])
def test_no_size_and_auto_are_the_models_own(size):
    options = read_generation({"prompt": "x", "size": size}).request.options
    assert not options.HasField("width_px")
    assert not options.HasField("height_px")


def test_a_seed_of_minus_one_is_a_new_one():
    assert not read_generation({"prompt": "x", "seed": -1}).request.options.HasField("seed")
    assert read_generation({"prompt": "x", "seed": 0}).request.options.seed == 0


def test_the_best_compression_of_openai_is_the_lowest_quality_there_is():
    assert read_generation({"prompt": "x", "output_compression": 0}).request.options.encoding.quality == 1


def test_adapters_have_the_names_of_both_apis():
    loras = [
        {"lora_id": "ink", "lora_filename": "ink.safetensors", "lora_scale": 0.5},
        {"lora_id": "oil", "filename": "oil.safetensors", "scale": -1},
        {"path": "/models/own.safetensors"},
    ]
    call = read_generation({"prompt": "x", "loras": loras})
    ink, oil, own = call.request.options.loras
    assert (ink.catalogue.lora_id, ink.catalogue.filename, ink.scale) == ("ink", "ink.safetensors", 0.5)
    assert (oil.catalogue.filename, oil.scale) == ("oil.safetensors", -1)
    assert own.path == "/models/own.safetensors"
    assert not own.HasField("scale")
    assert call.paths == ("loras[2].path",)


@pytest.mark.parametrize("name", ["background", "style"])
def test_backdrops_are_replayed_unless_they_say_otherwise(name):
    read, body = READERS[name]
    assert read(body).request.options.HasField("teleport")
    assert not read({**body, "teleport": False}).request.options.HasField("teleport")


def test_an_edit_has_its_pictures_in_order_and_its_mask():
    body = {"prompt": "x", "images": [{"image_url": URL}, URL], "mask": {"image_url": URL}, "strength": 0.6}
    call = read_edit(body)
    assert call.method is Method.EDIT
    assert [each.encoded for each in call.request.images] == [DATA, DATA]
    assert (call.request.mask.encoded, call.event) == (DATA, "image_edit")
    assert call.request.strength == pytest.approx(0.6)
    assert not call.request.HasField("control")


def test_files_of_a_form_are_pictures_too():
    assert [each.encoded for each in read_edit({"prompt": "x", "image": [b"a", b"b"]}).request.images] == [b"a", b"b"]
    assert read_variation({"image": b"a", "strength": 0.2}).request.image.encoded == b"a"


def test_an_upscale_says_how_much():
    call = read_upscale({"image": URL, "model": "big", "factor": 2, "tile": 128, "output_format": "png"})
    assert call.request == pb.UpscaleImageRequest(
        image=media_pb2.ImageInput(encoded=DATA),
        model="big",
        factor=2,
        tile_px=128,
        encoding=media_pb2.ImageEncoding(format=media_pb2.IMAGE_FORMAT_PNG),
    )


WRONG = {
    "prompt": [None, "", 7, ["a"]],
    "size": ["512", 512, "0x512", "512x", "512 x 512", "100000x1", "-1x5", "", [], "AUTO"],
    "n": [0, 11, 1.5, True, "2"],
    "steps": [0, 151, "20"],
    "guidance": [-1, 101, "7"],
    "seed": [-2, 2**63, 0.5, "5"],
    "sampler": ["", 5, "x" * 65],
    "scheduler": ["", {}],
    "negative_prompt": [5],
    "loras": [{}, "ink", [{"lora_id": "a"}] * 9],
    "teleport": [1, "true", []],
    "background": ["green", 1],
    "output_format": ["gif", 1],
    "output_compression": [-1, 101],
    "output_effort": [7],
    "response_format": ["file", 1],
    "partial_images": [4, -1, True],
    "stream": ["true", 1],
    "vae_tiling": [1],
    "embed_parameters": ["no"],
    "clip_skip": [-1],
    "eta": [-0.1],
    "flow_shift": [True],
    "model": ["", 1],
}


@pytest.mark.parametrize(("field", "value"), [(name, each) for name, values in WRONG.items() for each in values])
def test_a_malformed_field_is_refused_by_its_name(field, value):
    error = refused(read_generation, {"prompt": "x", "stream": True, field: value})
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, field)
    assert error.message.startswith(f"'{field}'")


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        ({}, "loras[0].lora_id"),
        ({"lora_id": 5}, "loras[0].lora_id"),
        ({"lora_id": "a", "scale": "1"}, "loras[0].scale"),
        ({"lora_id": "a", "scale": 1, "lora_scale": 1}, "loras[0].scale"),
        ({"lora_id": "a", "path": "/x"}, "loras[0].path"),
        ({"lora_id": "a", "weight": 1}, "loras[0].weight"),
    ],
)
def test_a_malformed_adapter_is_refused_by_its_place(lora, field):
    assert refused(read_generation, {"prompt": "x", "loras": [lora]}).field == field


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("generation", {"partial_images": 1}, "partial_images"),
        ("generation", {"background": "transparent", "output_format": "jpeg"}, "background"),
        ("generation", {"output_format": "png", "output_compression": 50}, "output_compression"),
        ("generation", {"teleport": {"start_step": -1}}, "teleport.start_step"),
        ("generation", {"image": URL}, "image"),
        ("edit", {"image": None}, "image"),
        ("edit", {"images": [URL]}, "images"),
        ("edit", {"image": []}, "image"),
        ("edit", {"image": [URL, "data:x"]}, "image[1]"),
        ("edit", {"image": [URL] * 17}, "image"),
        ("edit", {"image": b""}, "image"),
        ("edit", {"image": {"image_url": "data:image/png;base64,!"}}, "image.image_url"),
        ("edit", {"image": {}}, "image.image_url"),
        ("edit", {"mask": 5}, "mask"),
        ("edit", {"strength": 1.5}, "strength"),
        ("edit", {"control_strength": 1}, "control_strength"),
        ("variation", {"image": None}, "image"),
        ("variation", {"prompt": "x"}, "prompt"),
        ("upscale", {"factor": 1}, "factor"),
        ("upscale", {"tile": 1}, "tile"),
        ("upscale", {"n": 2}, "n"),
        ("style", {"image": None}, "image"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(name, body, field):
    read, good = READERS[name]
    error = refused(read, {**good, **body})
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"image": {"image_url": "https://example.com/a.png"}}, "image.image_url"),
        ({"image": {"file_id": "file-1"}}, "image.file_id"),
    ],
)
def test_what_nothing_here_can_do_is_refused_as_unsupported(body, field):
    read, good = READERS["edit"]
    error = refused(read, {**good, **body})
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, field)


@pytest.mark.parametrize(
    ("contract", "rest"),
    [
        ("prompt", "prompt"),
        ("options.steps", "steps"),
        ("steps", "steps"),
        ("options.width_px", "size"),
        ("options.height_px", "size"),
        ("options.encoding.quality", "output_compression"),
        ("options.encoding.format", "output_format"),
        ("options.loras[1].catalogue.lora_id", "loras[1].lora_id"),
        ("options.loras[0].path", "loras[0].path"),
        ("options.teleport.start_step", "teleport.start_step"),
        ("images", "image"),
        ("images[0]", "image[0]"),
        ("images[1].encoded", "image[1]"),
        ("mask", "mask"),
        ("mask.encoded", "mask"),
        ("control", "control_image"),
        ("control_strength", "control_strength"),
    ],
)
def test_fields_of_the_contract_have_the_callers_names(contract, rest):
    assert read_edit({"prompt": "x", "image": [URL, URL]}).rest_field(contract) == rest


def test_a_lone_picture_has_the_name_without_a_number():
    assert read_edit({"prompt": "x", "image": URL}).rest_field("images[0]") == "image"
    assert read_variation({"image": URL}).rest_field("image") == "image"
    assert read_upscale({"image": URL}).rest_field("tile_px") == "tile"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_json_is_read_or_refused_with_a_name(name, data):
    read, good = READERS[name]
    table = {"edit": requests.EDIT, "variation": requests.VARIATION, "upscale": requests.UPSCALE}.get(
        name, requests.EDIT if name == "style" else requests.GENERATION
    )
    body = {**good, **data.draw(st.dictionaries(st.sampled_from(sorted(table.fields)), JSON, max_size=4))}
    found = outcome(read, body)
    if isinstance(found, DomainError):
        assert found.field
        assert found.reason in {Reason.INVALID_REQUEST, Reason.UNSUPPORTED}
    else:
        assert found.request.SerializeToString()
