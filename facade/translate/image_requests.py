"""POST /v1/images/*: bodies become the contract's requests for pictures."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from facade.translate.fields import Custom, Integer, Number, Schema, Text, check_length, refuse, wrong_type
from facade.translate.image_options import (
    ENCODING_FIELDS,
    MODEL,
    OPTION_FIELDS,
    PROMPT,
    TOLERATED,
    Values,
    encoding_of,
    options_of,
)
from facade.translate.messages import read_image, unsupported
from facade.translate.record import Field, Record, record
from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.media.v1 import media_pb2

_MOST_IMAGES: Final = 16


PictureRequest = pb.GenerateImageRequest | pb.EditImageRequest | pb.VaryImageRequest | pb.UpscaleImageRequest


class Method(Enum):
    """What the engine is asked to do; the value is the RPC's name."""

    GENERATE = "GenerateImage"
    EDIT = "EditImage"
    VARY = "VaryImage"
    UPSCALE = "UpscaleImage"


@dataclass(frozen=True, slots=True)
class PictureCall:
    """What a request asks for.

    `pictures`: how many it makes. `event`: what its events' names begin with. `images`: what the caller calls its
    pictures, one name for each, as the contract numbers them. `paths`: fields that only the operator may give. `as_urls`:
    pictures are told by URLs.
    """

    method: Method
    request: PictureRequest
    pictures: int = 1
    stream: bool = False
    event: str = "image_generation"
    images: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    as_urls: bool = False

    def take_at_once(self) -> None:
        """Have it refused instead of queued."""
        if isinstance(self.request, pb.UpscaleImageRequest):
            self.request.may_wait = False
        else:
            self.request.options.may_wait = False

    def leave_out_steps(self) -> None:
        """Have nothing told but the pictures."""
        if not isinstance(self.request, pb.UpscaleImageRequest):
            self.request.options.without_steps = True

    def rest_field(self, path: str) -> str:
        """Return the REST name of a field that the contract names by its path."""
        path = path.removeprefix("options.")
        found = _IMAGE.match(path)
        if found:
            if self.images and not found["place"]:
                return self.images[0].partition("[")[0]
            place = int(found["place"] or 0)
            return self.images[place] if place < len(self.images) else path
        for theirs, ours in _NAMES:
            if path == theirs or path.startswith((f"{theirs}.", f"{theirs}[")):
                return ours
        return _LORA_PARTS.sub(r"\1", path)


_IMAGE: Final = re.compile(r"images?(?:\[(?P<place>\d{1,3})\])?(?:\.(?:encoded|raw)\b.*)?$")
_LORA_PARTS: Final = re.compile(r"^(loras\[\d{1,3}\])\.(?:source\.)?catalogue(?=\.|$)")
_NAMES: Final = (
    ("width_px", "size"),
    ("height_px", "size"),
    ("encoding.format", "output_format"),
    ("encoding.quality", "output_compression"),
    ("encoding.effort", "output_effort"),
    ("encoding.embed_parameters", "embed_parameters"),
    ("encoding", "output_format"),
    ("mask", "mask"),
    ("control", "control_image"),
    ("tile_px", "tile"),
)


def _read_file(value: object, path: str) -> bytes:
    """Read a picture: a file of a form, a data: URL, or an object that holds one."""
    if isinstance(value, bytes):
        if not value:
            refuse(path, "must not be empty")
        return value
    if isinstance(value, str):
        return read_image(value, path).data
    if not isinstance(value, dict):
        wrong_type(path, "a file, a data: URL, or an object with 'image_url'", value)
    given = _REFERENCE.read(value, path)
    if "image_url" not in given:
        refuse(f"{path}.image_url", "is required", code="missing_required_parameter")
    return read_image(given["image_url"], f"{path}.image_url").data


_REFERENCE: Final = record(
    [
        Field("image_url", Text(1), "A data: URL with the picture in base64."),
        Field(
            "file_id", Custom(lambda _, path: unsupported(path, "is not supported; send the picture itself"), {}), ""
        ),
    ]
)
_FILE_SCHEMA: Final[Schema] = {
    "oneOf": [
        {"type": "string", "description": "A data: URL, or in a form a file."},
        {"type": "object", "properties": {"image_url": {"type": "string"}}, "required": ["image_url"]},
    ]
}
_FILES_SCHEMA: Final[Schema] = {
    "oneOf": [*_FILE_SCHEMA["oneOf"], {"type": "array", "minItems": 1, "maxItems": _MOST_IMAGES, "items": _FILE_SCHEMA}]
}


def _read_files(value: object, path: str) -> list[tuple[str, bytes]]:
    """Read one picture or several, each with its name."""
    if not isinstance(value, list):
        return [(path, _read_file(value, path))]
    check_length(value, path, 1, _MOST_IMAGES)
    named = [(f"{path}[{place}]", item) for place, item in enumerate(value)]
    return [(name, _read_file(item, name)) for name, item in named]


def _file(name: str, sentence: str, *, required: bool = False) -> Field:
    return Field(name, Custom(_read_file, _FILE_SCHEMA), sentence, required=required)


_FILES: Final = Custom(_read_files, _FILES_SCHEMA)
_STRENGTH: Final = Field("strength", Number(0, 1), "How far to leave the first picture; absent means the model's own.")
GENERATION: Final = record((PROMPT, *OPTION_FIELDS), TOLERATED)
EDIT: Final = record(
    (
        PROMPT,
        Field("image", _FILES, "What to edit: one picture or up to 16; the others are references."),
        Field("images", _FILES, "Another name of image."),
        _file("mask", "Where to edit, of the first picture's size: transparent pixels are painted."),
        _STRENGTH,
        Field("reference_strength", Number(0, 1), "Weight of the references, for models that have it."),
        _file("control_image", "A picture whose shapes to follow, for models with a control network."),
        Field("control_strength", Number(0, 2), "Weight of control_image."),
        *OPTION_FIELDS,
    ),
    TOLERATED,
)
VARIATION: Final = record(
    (_file("image", "What the new pictures are to resemble.", required=True), _STRENGTH, *OPTION_FIELDS), TOLERATED
)
UPSCALE: Final = record(
    (
        _file("image", "What to enlarge.", required=True),
        MODEL,
        Field("factor", Number(1, 16, above=True), "How much larger; absent means the model's own factor."),
        Field("tile", Integer(16, 4096), "Edge of a tile in pixels; absent means as set."),
        *ENCODING_FIELDS,
    ),
    {"user": "Accepted and not used."},
)
_REPLAYED: Final = {"teleport": True}


def read_generation(body: Mapping[str, Any]) -> PictureCall:
    """Translate a body; DomainError names the field at fault."""
    return _generation(GENERATION.read(body, ""))


def read_background(body: Mapping[str, Any]) -> PictureCall:
    """Translate a body, with exact replay unless it says otherwise; DomainError names the field at fault."""
    return _generation(GENERATION.read({**_REPLAYED, **body}, ""))


def _generation(values: Values) -> PictureCall:
    options = options_of(values)
    request = pb.GenerateImageRequest(prompt=values["prompt"], options=options)
    return _call(Method.GENERATE, request, values, options)


def read_edit(body: Mapping[str, Any]) -> PictureCall:
    """Translate a body; DomainError names the field at fault."""
    return _edit(EDIT.read(body, ""))


def read_background_style(body: Mapping[str, Any]) -> PictureCall:
    """Translate a body, with exact replay unless it says otherwise; DomainError names the field at fault."""
    return _edit(EDIT.read({**_REPLAYED, **body}, ""))


def _edit(values: Values) -> PictureCall:
    if "image" in values and "images" in values:
        refuse("images", "cannot be combined with 'image'")
    named = values.get("image") or values.get("images")
    if not named:
        refuse("image", "is required", code="missing_required_parameter")
    if "control_strength" in values and "control_image" not in values:
        refuse("control_strength", "is only allowed with 'control_image'")
    options = options_of(values)
    request = pb.EditImageRequest(
        prompt=values["prompt"],
        options=options,
        images=[media_pb2.ImageInput(encoded=data) for _, data in named],
        mask=_input(values, "mask"),
        strength=values.get("strength"),
        reference_strength=values.get("reference_strength"),
        control=_input(values, "control_image"),
        control_strength=values.get("control_strength"),
    )
    names = tuple(name for name, _ in named)
    return _call(Method.EDIT, request, values, options, event="image_edit", images=names)


def read_variation(body: Mapping[str, Any]) -> PictureCall:
    """Translate a body; DomainError names the field at fault."""
    values = VARIATION.read(body, "")
    options = options_of(values)
    request = pb.VaryImageRequest(image=_input(values, "image"), options=options, strength=values.get("strength"))
    return _call(Method.VARY, request, values, options, event="image_variation", images=("image",))


def read_upscale(body: Mapping[str, Any]) -> PictureCall:
    """Translate a body; DomainError names the field at fault."""
    values = UPSCALE.read(body, "")
    request = pb.UpscaleImageRequest(
        image=_input(values, "image"),
        model=values.get("model", ""),
        factor=values.get("factor"),
        tile_px=values.get("tile"),
        encoding=encoding_of(values),
    )
    return PictureCall(Method.UPSCALE, request, images=("image",), as_urls=_as_urls(values))


def _input(values: Values, name: str) -> media_pb2.ImageInput | None:
    return media_pb2.ImageInput(encoded=values[name]) if name in values else None


def _as_urls(values: Values) -> bool:
    return bool(values.get("response_format") == "url")


def _call(
    method: Method,
    request: PictureRequest,
    values: Values,
    options: pb.ImageOptions,
    *,
    event: str = "image_generation",
    images: tuple[str, ...] = (),
) -> PictureCall:
    return PictureCall(
        method=method,
        request=request,
        pictures=values.get("n", 1),
        stream=values.get("stream", False),
        event=event,
        images=images,
        as_urls=_as_urls(values),
        paths=tuple(f"loras[{place}].path" for place, lora in enumerate(options.loras) if lora.HasField("path")),
    )


def form_schema(table: Record) -> Schema:
    """Return the schema of a form's fields: pictures are files there."""
    schema = table.schema()
    properties = {
        name: {"type": "string", "format": "binary", "description": each["description"]}
        if name in _FILE_NAMES
        else each
        for name, each in schema["properties"].items()
    }
    return schema | {"properties": properties}


_FILE_NAMES: Final = frozenset({"image", "images", "mask", "control_image"})
