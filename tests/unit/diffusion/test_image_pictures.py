"""Pictures as callers give them, as the engine starts from them, and as files."""

import io

import pytest
from PIL import Image

from services.diffusion.adapters import pictures
from services.diffusion.adapters.engine import Pixels
from services.diffusion.core.family import FAMILIES
from services.diffusion.core.options import Encoding, Format
from services.diffusion.scene import Sources, open_sources, scene
from services.kit.errors import DomainError, Reason

MOST = 10_000
PLAIN, EDITS = FAMILIES["sd1"], FAMILIES["qwen-image"]


def file(picture: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def colour(width: int = 8, height: int = 6, mode: str = "RGB", value: object = (10, 20, 30)) -> Image.Image:
    return Image.new(mode, (width, height), value)


def refused(call, *arguments: object, **named: object) -> DomainError:
    with pytest.raises(DomainError) as caught:
        call(*arguments, **named)
    return caught.value


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
def test_the_formats_of_the_contract_are_read(form):
    assert pictures.decode(file(colour(), form), "image", most_pixels=MOST).size == (8, 6)


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", file(colour())[:40], file(colour(), "BMP"), b"\x89PNG\r\n\x1a\n" + bytes(99)]
)
def test_what_is_no_picture_is_refused_naming_the_field(data):
    error = refused(pictures.decode, data, "images[1]", most_pixels=MOST)
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "images[1]")


def test_a_picture_is_measured_before_it_is_decoded():
    error = refused(pictures.decode, file(colour(101, 100)), "image", most_pixels=MOST)
    assert (error.reason, error.field) == (Reason.TOO_LARGE, "image")


def test_a_photograph_is_turned_as_its_camera_says():
    exif = Image.Exif()
    exif[274] = 6  # on its side
    assert pictures.decode(file(colour(), "JPEG", exif=exif), "image", most_pixels=MOST).size == (6, 8)


@pytest.mark.parametrize(
    ("pixels", "field"),
    [
        (Pixels(2, 2, 2, bytes(8)), "image.raw.channels"),
        (Pixels(2, 2, 3, bytes(11)), "image.raw.samples"),
        (Pixels(0, 2, 3, b""), "image"),
        (Pixels(200, 200, 1, bytes(40_000)), "image"),
    ],
)
def test_samples_must_be_what_they_say(pixels, field):
    assert refused(pictures.from_samples, pixels, "image", most_pixels=MOST).field == field


def test_a_mask_paints_where_it_is_transparent_or_white():
    assert pictures.painted(colour(mode="RGBA", value=(0, 0, 0, 0))).getextrema() == (255, 255)
    assert pictures.painted(colour(mode="RGBA", value=(255, 255, 255, 255))).getextrema() == (0, 0)
    assert pictures.painted(colour(value=(255, 255, 255))).getextrema() == (255, 255)


@pytest.mark.parametrize("form", [Format.PNG, Format.WEBP, Format.JPEG])
def test_a_file_tells_how_it_was_made(form):
    pixels = pictures.to_pixels(colour(), channels=3)
    data = pictures.encode(pixels, Encoding(form, 90, 0, embeds=True), "ein Bär\nSteps: 2")
    opened = Image.open(io.BytesIO(data))
    assert opened.format == form.value
    if form is Format.PNG:
        assert opened.info["parameters"] == "ein Bär\nSteps: 2"
    else:
        comment = opened.getexif().get_ifd(0x8769)[0x9286]
        assert comment.removeprefix(b"UNICODE\0").decode("utf-16-be") == "ein Bär\nSteps: 2"


def test_samples_stay_as_they_are():
    pixels = pictures.to_pixels(colour(), channels=3)
    assert pictures.encode(pixels, Encoding(Format.RAW, 90, 0, embeds=True), "text") == pixels.samples
    assert pictures.encode(pixels, Encoding(Format.PNG, 90, 0, embeds=False)) == pictures.encode(
        pixels, Encoding(Format.PNG, 10, 6, embeds=False)
    )


def opened(sources: Sources, family=PLAIN, *, has_control: bool = False):
    return open_sources(sources, family, has_control=has_control, most_pixels=MOST)


def test_the_first_picture_is_the_start_in_the_size_that_is_made():
    sources = Sources(images=(file(colour(16, 8)),), mask=file(colour(16, 8, "L", 255)), strength=0.25)
    found = scene(opened(sources), sources, PLAIN, width=32, height=24)
    assert (found.start.width, found.start.height, found.start.channels) == (32, 24, 3)
    assert (found.mask.width, found.mask.height, found.mask.channels) == (32, 24, 1)
    assert (found.strength, found.references) == (0.25, ())


def test_for_a_model_of_references_all_are_unless_something_is_to_be_painted():
    sources = Sources(images=(file(colour()), file(colour(4, 4))))
    found = scene(opened(sources, EDITS), sources, EDITS, width=32, height=24)
    assert found.start is None
    assert [(each.width, each.height) for each in found.references] == [(8, 6), (4, 4)]
    sources = Sources(images=(file(colour()),), mask=file(colour()))
    assert scene(opened(sources, EDITS), sources, EDITS, width=32, height=24).start is not None


@pytest.mark.parametrize(
    ("sources", "reason", "field"),
    [
        (Sources(images=(file(colour()),) * 2), Reason.UNSUPPORTED, "images"),
        (Sources(images=(file(colour()),), mask=file(colour(3, 3))), Reason.INVALID_REQUEST, "mask"),
        (Sources(images=(file(colour()),), strength=1.5), Reason.INVALID_REQUEST, "strength"),
        (Sources(images=(file(colour()),), reference_strength=0.5), Reason.UNSUPPORTED, "reference_strength"),
        (Sources(images=(file(colour()),), control=file(colour())), Reason.UNSUPPORTED, "control"),
        (Sources(images=(b"x",), field="image"), Reason.INVALID_REQUEST, "image"),
    ],
)
def test_what_a_model_cannot_start_from_is_refused_naming_the_field(sources, reason, field):
    error = refused(opened, sources)
    assert (error.reason, error.field) == (reason, field)


def test_at_most_sixteen_pictures():
    assert refused(opened, Sources(images=(file(colour()),) * 17), EDITS).field == "images"
    with pytest.raises(DomainError) as caught:
        opened(Sources(images=(file(colour()), b"x")), EDITS)
    assert caught.value.field == "images[1]"
