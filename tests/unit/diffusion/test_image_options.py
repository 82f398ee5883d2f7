"""What a request may ask for, and what becomes of what it does not say."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.diffusion.core.catalogue import Kind, entry, find
from services.diffusion.core.options import (
    AskedEncoding,
    AskedOptions,
    Bounds,
    Defaults,
    Encoding,
    Format,
    Options,
    check_options,
)
from services.diffusion.core.parameters import Facts, parameters
from services.diffusion.core.prompts import without_adapters
from services.diffusion.core.tiles import spans
from services.diffusion.core.wire import Tiling
from services.kit.errors import DomainError, Reason

TILING = Tiling(32, 32, 0.5)
DEFAULTS = Defaults(512, 768, 20, 7.0, 0.0, TILING, False, Encoding(Format.WEBP, 90, 4, True))
BOUNDS = Bounds(pixels=1024 * 1024, prompt_chars=100, batch=1)


def checked(prompt: str = "a cat", defaults: Defaults = DEFAULTS, size=None, **asked: object) -> Options:
    return check_options(prompt, AskedOptions(**asked), defaults, BOUNDS, size=size)


def refused(**asked: object) -> DomainError:
    with pytest.raises(DomainError) as caught:
        checked(**asked)
    return caught.value


def test_what_is_not_said_is_as_the_model_has_it():
    options = checked()
    assert (options.width, options.height, options.sampling.steps, options.sampling.guidance) == (512, 768, 20, 7.0)
    assert (options.n, options.seed, options.tiling, options.clip_skip) == (1, None, None, -1)
    assert options.encoding == DEFAULTS.encoding
    assert options.may_wait


def test_only_an_exact_zero_of_guidance_is_replaced():
    mapped = dataclasses.replace(DEFAULTS, zero_guidance=1.5)
    assert checked(defaults=mapped, guidance=0.0).sampling.guidance == 1.5
    assert checked(defaults=mapped, guidance=0.1).sampling.guidance == 0.1
    assert checked(guidance=0.0).sampling.guidance == 0.0
    assert checked(defaults=mapped).sampling.guidance == 7.0


def test_a_request_may_tile_or_not_whatever_the_settings_say():
    tiles = dataclasses.replace(DEFAULTS, tiles=True)
    assert checked(defaults=tiles).tiling == TILING
    assert checked(defaults=tiles, vae_tiling=False).tiling is None
    assert checked(vae_tiling=True).tiling == TILING


def test_an_edit_is_as_large_as_its_picture_and_never_larger_than_may_be():
    options = checked(size=(300, 200))
    assert (options.width, options.height) == (300, 200)
    options = checked(size=(4096, 2048))
    assert options.width * options.height <= BOUNDS.pixels
    assert options.width == pytest.approx(2 * options.height, abs=2)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"steps": 151}, "options.steps"),
        ({"guidance": float("nan")}, "options.guidance"),
        ({"distilled_guidance": -0.1}, "options.distilled_guidance"),
        ({"seed": 2**63 - 1}, "options.seed"),
        ({"n": 0}, "options.n"),
        ({"clip_skip": 0}, "options.clip_skip"),
        ({"eta": 1.5}, "options.eta"),
        ({"flow_shift": float("inf")}, "options.flow_shift"),
        ({"previews": 4}, "options.partial_images"),
        ({"width": 512}, "options.height_px"),
        ({"width": 1, "height": 64}, "options.width_px"),
        ({"width": 2048, "height": 2048}, "options.width_px"),
        ({"sampler": "Euler"}, "options.sampler"),
        ({"scheduler": ""}, "options.scheduler"),
        ({"transparent": True}, "options.background"),
        ({"encoding": AskedEncoding(effort=7)}, "options.encoding.effort"),
        ({"prompt": "x" * 101}, "prompt"),
        ({"prompt": "a\0b"}, "prompt"),
        ({"negative_prompt": "x" * 101}, "options.negative_prompt"),
    ],
)
def test_what_is_out_of_range_is_refused_naming_the_field(asked, field):
    error = refused(**asked)
    assert error.field == field
    assert error.reason in {Reason.INVALID_REQUEST, Reason.UNSUPPORTED, Reason.TOO_LARGE}


def test_every_seed_of_a_request_fits():
    assert checked(seed=2**63 - 11, n=10).seed == 2**63 - 11


@pytest.mark.parametrize(
    "prompt",
    [
        "a cat<lora:/etc/passwd:1>",
        "a cat< LoRA :x:1 >",
        "a cat<lo<lora:a:1>ra:b:1>",
        "a <lyco:x>cat",
        "a cat<hypernet:x:0.5>",
    ],
)
def test_adapter_tags_are_removed(prompt):
    assert without_adapters(prompt).strip() == "a cat"


@given(st.text(alphabet="<lora:>x1 ", max_size=60))
def test_no_tag_is_ever_left(prompt):
    left = without_adapters(prompt)
    assert without_adapters(left) == left
    assert "<lora:x>" not in left


def test_other_brackets_stay():
    assert without_adapters("a <b> c <lora> 1 < 2") == "a <b> c <lora> 1 < 2"


@given(st.integers(1, 500), st.integers(8, 200), st.integers(0, 40))
def test_tiles_cover_a_length_once_and_bring_their_surroundings(length, tile, margin):
    found = list(spans(length, tile=tile, margin=margin))
    assert [pixel for span in found for pixel in range(span.keep, span.until)] == list(range(length))
    for span in found:
        assert span.first == max(0, span.keep - margin)
        assert span.last == min(length, span.until + margin)


def test_parameters_read_like_those_of_other_tools():
    text = parameters(checked(negative_prompt="blur"), Facts("m", 7, 512, 768, "euler", "discrete"))
    assert text.splitlines() == [
        "a cat",
        "Negative prompt: blur",
        "Steps: 20, CFG scale: 7, Seed: 7, Size: 512x768, Sampler: euler discrete, Model: m, Version: stable-diffusion.cpp",
    ]


def test_models_are_found_by_every_name_and_the_first_by_none():
    known = [entry("Big-Model", Kind.IMAGE, name="pretty", aliases=("p",)), entry("x4", Kind.UPSCALER)]
    for name in ("", "pretty", "p", "Big-Model"):
        assert find(name, known, (Kind.IMAGE,)).name == "pretty"
    with pytest.raises(DomainError) as caught:
        find("x4", known, (Kind.IMAGE,))
    assert caught.value.reason is Reason.INVALID_REQUEST


def test_without_a_model_the_refusal_names_the_setting():
    with pytest.raises(DomainError) as caught:
        find("", [], (Kind.IMAGE,))
    assert caught.value.reason is Reason.NOT_FOUND
    assert "OMNISERVE_SD_MODEL" in caught.value.message
