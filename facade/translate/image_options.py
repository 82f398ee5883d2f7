"""The fields that requests for pictures share, and the ImageOptions they become."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from facade.translate.fields import Boolean, Choice, Custom, Integer, ListOf, Number, Text, refuse, wrong_type
from facade.translate.record import Field, record
from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.media.v1 import media_pb2

Values = Mapping[str, Any]

MOST_PICTURES: Final = 10
_MOST_LORAS: Final = 8
# The last picture's seed still fits into 64 bits.
_MOST_SEED: Final = 2**63 - 1 - MOST_PICTURES
_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
FORMATS: Final[Mapping[str, int]] = MappingProxyType(
    {"png": media_pb2.IMAGE_FORMAT_PNG, "jpeg": media_pb2.IMAGE_FORMAT_JPEG, "webp": media_pb2.IMAGE_FORMAT_WEBP}
)
_BACKGROUNDS: Final[Mapping[str, int]] = MappingProxyType(
    {"auto": pb.BACKGROUND_AUTO, "opaque": pb.BACKGROUND_OPAQUE, "transparent": pb.BACKGROUND_TRANSPARENT}
)


def read_size(value: object, path: str) -> tuple[int, int] | None:
    """Read columns and rows, None for auto."""
    if value == "auto":
        return None
    if not isinstance(value, str):
        wrong_type(path, "'auto' or WIDTHxHEIGHT", value)
    found = _SIZE.fullmatch(value)
    if found is None:
        refuse(path, f"must be 'auto' or WIDTHxHEIGHT in pixels, e.g. 1024x1024, not {value[:40]!r}")
    return int(found[1]), int(found[2])


def read_teleport(value: object, path: str) -> pb.Teleport | None:
    """Read whether, and from which step, exact replay is wanted."""
    if isinstance(value, bool):
        return pb.Teleport() if value else None
    if not isinstance(value, dict):
        wrong_type(path, "true, false or an object", value)
    return pb.Teleport(start_step=_TELEPORT.read(value, path).get("start_step"))


_TELEPORT: Final = record([Field("start_step", Integer(0, 149), "Step from which denoising resumes.")])
_LORA: Final = record(
    [
        Field("lora_id", Text(1, 256), "Its id below OMNISERVE_LORA_DIR."),
        Field("lora_filename", Text(1, 256), "File within it; needed when it has several."),
        Field("lora_scale", Number(-16, 16), "Strength; absent means 1."),
        Field("filename", Text(1, 256), "Another name of lora_filename."),
        Field("scale", Number(-16, 16), "Another name of lora_scale."),
        Field("path", Text(1, 4096), "An absolute path; on the operator's listener only, instead of lora_id."),
    ]
)


def read_lora(value: object, path: str) -> pb.Lora:
    """Read one adapter: an id from the catalogue, or a path."""
    given = _LORA.read(value, path)
    for name in ("filename", "scale"):
        if name in given and f"lora_{name}" in given:
            refuse(f"{path}.{name}", f"cannot be combined with 'lora_{name}'")
    filename = given.get("lora_filename", given.get("filename"))
    scale = given.get("lora_scale", given.get("scale"))
    if "path" in given:
        if "lora_id" in given or filename is not None:
            refuse(f"{path}.path", "cannot be combined with 'lora_id' and 'lora_filename'")
        return pb.Lora(path=given["path"], scale=scale)
    if "lora_id" not in given:
        refuse(f"{path}.lora_id", "is required", code="missing_required_parameter")
    return pb.Lora(catalogue=pb.CatalogueLora(lora_id=given["lora_id"], filename=filename), scale=scale)


PROMPT: Final = Field("prompt", Text(1, 32_000), "What should be seen.", required=True)
MODEL: Final = Field("model", Text(1, 256), "Catalogue name or alias; absent means the default model.")
SIZE: Final = Field(
    "size",
    Custom(read_size, {"type": "string", "pattern": r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$"}),
    "WIDTHxHEIGHT, rounded as the model needs it; absent or auto means the model's own, or that of the picture edited.",
)
ENCODING_FIELDS: Final = (
    Field("output_format", Choice(tuple(FORMATS)), "How pictures are written; absent means as set, usually webp."),
    Field("output_compression", Integer(0, 100), "Quality of webp and jpeg; absent means as set."),
    Field("output_effort", Integer(0, 6), "For webp: 0 writes fast, 6 small; absent means as set."),
    Field("embed_parameters", Boolean(), "Write the parameters into the file; absent means as set."),
    Field(
        "response_format",
        Choice(("b64_json", "url")),
        "How pictures are told: in the answer, or as a URL that is good for a while; absent means b64_json.",
    ),
)
STREAM_FIELDS: Final = (
    Field("stream", Boolean(), "Send events while the pictures are made."),
    Field("partial_images", Integer(0, 3), "Previews of each picture, with stream."),
)
OPTION_FIELDS: Final = (
    MODEL,
    Field(
        "n", Integer(1, MOST_PICTURES), "How many pictures; absent means 1. Picture i has the seed of the first + i."
    ),
    SIZE,
    Field("negative_prompt", Text(0, 32_000), "What should not be seen."),
    Field("steps", Integer(1, 150), "Denoising steps; absent means the model's own."),
    Field("guidance", Number(0, 100), "Classifier-free guidance; absent means the model's own."),
    Field("distilled_guidance", Number(0, 100), "Guidance of distilled models."),
    Field("sampler", Text(1, 64), "The sampler's name as the engine has it, e.g. euler."),
    Field("scheduler", Text(1, 64), "The noise schedule's name as the engine has it, e.g. karras."),
    Field("seed", Integer(-1, _MOST_SEED), "Reproduces the picture; absent or -1 means a new one, which is reported."),
    Field("loras", ListOf(Custom(read_lora, _LORA.schema()), most=_MOST_LORAS), "Adapters, at most 8."),
    Field(
        "teleport",
        Custom(read_teleport, {"oneOf": [{"type": "boolean"}, _TELEPORT.schema()]}),
        "Exact replay of what was made before with the very same inputs; never changes a byte.",
    ),
    Field("clip_skip", Integer(1, 12), "Last layers of the text encoder to skip."),
    Field("eta", Number(0, 1), "Noise that stochastic samplers add."),
    Field("flow_shift", Number(-100, 100), "Shift of flow models' schedule."),
    Field("vae_tiling", Boolean(), "Decode in tiles; absent means as set."),
    Field("background", Choice(tuple(_BACKGROUNDS)), "What stands behind the subject; absent means auto."),
    *STREAM_FIELDS,
    *ENCODING_FIELDS,
)
TOLERATED: Final = {
    "user": "Accepted and not used.",
    "quality": "No effect: `steps` and the model decide.",
    "style": "No effect.",
    "moderation": "No effect.",
    "input_fidelity": "No effect: `strength` decides.",
}
_ENCODED: Final = {"output_format", "output_compression", "output_effort", "embed_parameters"}


def encoding_of(values: Values) -> media_pb2.ImageEncoding | None:
    """Return how the pictures are to be written, None for as set. DomainError names what does not go together."""
    if values.get("output_format") == "png" and "output_compression" in values:
        refuse("output_compression", "is only allowed with 'output_format' webp or jpeg")
    if not _ENCODED & values.keys():
        return None
    quality = values.get("output_compression")
    return media_pb2.ImageEncoding(
        format=FORMATS.get(values.get("output_format", ""), media_pb2.IMAGE_FORMAT_UNSPECIFIED),  # type: ignore[arg-type]
        quality=None if quality is None else max(1, quality),
        effort=values.get("output_effort"),
        embed_parameters=values.get("embed_parameters"),
    )


def options_of(values: Values) -> pb.ImageOptions:
    """Return the options; DomainError names what does not go together."""
    if values.get("response_format") == "url" and values.get("stream"):
        refuse("response_format", "cannot be url when 'stream' is true: events hold the pictures themselves")
    if values.get("partial_images") and not values.get("stream"):
        refuse("partial_images", "is only allowed when 'stream' is true")
    background = values.get("background", "auto")
    if background == "transparent" and values.get("output_format") == "jpeg":
        refuse("background", "cannot be transparent with 'output_format' jpeg")
    size = values.get("size") or (None, None)
    seed = values.get("seed", -1)
    return pb.ImageOptions(
        model=values.get("model", ""),
        negative_prompt=values.get("negative_prompt", ""),
        width_px=size[0],
        height_px=size[1],
        seed=None if seed == -1 else seed,
        n=values.get("n"),
        loras=values.get("loras", ()),
        teleport=values.get("teleport"),
        encoding=encoding_of(values),
        partial_images=values.get("partial_images", 0),
        background=_BACKGROUNDS[background],  # type: ignore[arg-type]
        **{name: values.get(name) for name in _AS_THEY_ARE},  # type: ignore[arg-type]  # none is a plain bool
    )


_AS_THEY_ARE: Final = (
    "steps", "guidance", "distilled_guidance", "sampler", "scheduler", "clip_skip", "eta", "flow_shift", "vae_tiling"
)  # fmt: skip
