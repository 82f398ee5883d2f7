"""What a request may ask for, and what becomes of what it does not say."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from services.diffusion.core.prompts import without_adapters
from services.diffusion.core.wire import Sampling, Tiling
from services.kit.errors import DomainError, Reason

SAMPLERS: Final = (
    "euler",
    "euler_a",
    "heun",
    "dpm2",
    "dpm++2s_a",
    "dpm++2m",
    "dpm++2mv2",
    "ipndm",
    "ipndm_v",
    "lcm",
    "ddim_trailing",
    "tcd",
    "res_multistep",
    "res_2s",
    "er_sde",
)
SCHEDULERS: Final = (
    "discrete",
    "karras",
    "exponential",
    "ays",
    "gits",
    "sgm_uniform",
    "simple",
    "smoothstep",
    "kl_optimal",
    "lcm",
    "bong_tangent",
)
MOST_STEPS: Final = 150
MOST_PICTURES: Final = 10
MOST_LORAS: Final = 8
MOST_PREVIEWS: Final = 3
LEAST_EDGE: Final = 16
MOST_SEED: Final = 2**63 - 1 - MOST_PICTURES


class Format(Enum):
    """How a picture is written; the values are Pillow's names, RAW is no file at all."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WEBP"
    RAW = "RAW"


@dataclass(frozen=True, slots=True)
class Encoding:
    """How to write a picture."""

    format: Format
    quality: int
    effort: int
    embeds: bool


@dataclass(frozen=True, slots=True)
class AskedEncoding:
    """As the caller wrote it; None: not said."""

    format: Format | None = None
    quality: int | None = None
    effort: int | None = None
    embeds: bool | None = None


@dataclass(frozen=True, slots=True)
class AskedLora:
    """An adapter: by its id below the folder, with a file's name, or by an absolute path."""

    lora_id: str = ""
    filename: str | None = None
    path: str | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class AskedOptions:
    """Options as the caller wrote them; None: not said. `transparent`: a transparent background is wanted."""

    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    distilled_guidance: float | None = None
    sampler: str | None = None
    scheduler: str | None = None
    seed: int | None = None
    n: int | None = None
    loras: tuple[AskedLora, ...] = ()
    teleports: bool = False
    start_step: int | None = None
    encoding: AskedEncoding = field(default_factory=AskedEncoding)
    previews: int = 0
    may_wait: bool | None = None
    clip_skip: int | None = None
    eta: float | None = None
    flow_shift: float | None = None
    transparent: bool = False
    vae_tiling: bool | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds when a request does not say. `zero_guidance`: what an exact 0 becomes, 0 leaves it."""

    width: int
    height: int
    steps: int
    guidance: float
    zero_guidance: float
    tiling: Tiling
    tiles: bool
    encoding: Encoding


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is too much. `batch`: pictures in one call of the engine."""

    pixels: int
    prompt_chars: int
    batch: int


@dataclass(frozen=True, slots=True)
class Options:
    """Options that can be obeyed. `seed`: None leaves the choice; `start_step`: None without teleport, else where it resumes."""

    prompt: str
    negative_prompt: str
    width: int
    height: int
    sampling: Sampling
    seed: int | None
    n: int
    clip_skip: int
    tiling: Tiling | None
    previews: int
    start_step: int | None
    encoding: Encoding
    may_wait: bool


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high


_RANGES: Final[Mapping[str, _Range]] = MappingProxyType(
    {
        "steps": _Range(1, MOST_STEPS),
        "guidance": _Range(0, 100),
        "distilled_guidance": _Range(0, 100),
        "seed": _Range(0, MOST_SEED),
        "n": _Range(1, MOST_PICTURES),
        "clip_skip": _Range(1, 12),
        "eta": _Range(0, 1),
        "flow_shift": _Range(-100, 100),
        "partial_images": _Range(0, MOST_PREVIEWS),
    }
)


def refusal(path: str, message: str) -> DomainError:
    """Return the error for a field that is not as it must be."""
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {message}", field=path)


def check_options(
    prompt: str, asked: AskedOptions, defaults: Defaults, bounds: Bounds, *, size: tuple[int, int] | None = None
) -> Options:
    """Return options with every default filled in. `size`: of the picture that is edited.

    Raises DomainError, naming the field by its path in the contract: `invalid_request` for a value out of range, `too_large`,
    and `unsupported` for what is not made here.
    """
    for name, value in (
        ("steps", asked.steps),
        ("guidance", asked.guidance),
        ("distilled_guidance", asked.distilled_guidance),
        ("seed", asked.seed),
        ("n", asked.n),
        ("clip_skip", asked.clip_skip),
        ("eta", asked.eta),
        ("flow_shift", asked.flow_shift),
        ("partial_images", asked.previews),
    ):
        if value is not None:
            check_range(f"options.{name}", value, _RANGES[name].low, _RANGES[name].high)
    if asked.transparent:
        message = "'options.background' is transparent; this model has no alpha channel"
        raise DomainError(Reason.UNSUPPORTED, message, field="options.background")
    _check_name("options.sampler", asked.sampler, SAMPLERS)
    _check_name("options.scheduler", asked.scheduler, SCHEDULERS)
    width, height = _size(asked, defaults, bounds, size)
    steps = defaults.steps if asked.steps is None else asked.steps
    guidance = defaults.guidance if asked.guidance is None else asked.guidance
    if asked.guidance == 0 and defaults.zero_guidance:
        guidance = defaults.zero_guidance
    tiles = defaults.tiles if asked.vae_tiling is None else asked.vae_tiling
    return Options(
        prompt=_text("prompt", prompt, bounds),
        negative_prompt=_text("options.negative_prompt", asked.negative_prompt, bounds),
        width=width,
        height=height,
        sampling=Sampling(
            steps=steps,
            guidance=guidance,
            distilled_guidance=asked.distilled_guidance,
            sampler=asked.sampler or "",
            scheduler=asked.scheduler or "",
            eta=asked.eta,
            flow_shift=asked.flow_shift,
        ),
        seed=asked.seed,
        n=1 if asked.n is None else asked.n,
        clip_skip=-1 if asked.clip_skip is None else asked.clip_skip,
        tiling=defaults.tiling if tiles else None,
        previews=asked.previews,
        start_step=None,
        encoding=check_encoding("options.encoding", asked.encoding, defaults.encoding),
        may_wait=asked.may_wait is not False,
    )


def check_encoding(path: str, asked: AskedEncoding, default: Encoding) -> Encoding:
    """Return how to write a picture. Raises DomainError `invalid_request`."""
    if asked.quality is not None:
        check_range(f"{path}.quality", asked.quality, 1, 100)
    if asked.effort is not None:
        check_range(f"{path}.effort", asked.effort, 0, 6)
    return Encoding(
        format=asked.format or default.format,
        quality=default.quality if asked.quality is None else asked.quality,
        effort=default.effort if asked.effort is None else asked.effort,
        embeds=default.embeds if asked.embeds is None else asked.embeds,
    )


def check_range(path: str, value: float, low: float, high: float) -> None:
    """Raise DomainError `invalid_request` for a number out of its range."""
    if not _Range(low, high).holds(value):
        raise refusal(path, f"is {value:g}; {low:g} to {high:g} is allowed")


def _check_name(path: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise refusal(path, f"is {name[:40]!r}; the engine has {', '.join(known)}")


def _text(path: str, text: str, bounds: Bounds) -> str:
    if len(text) > bounds.prompt_chars:
        message = f"'{path}' has {len(text)} characters; the most is {bounds.prompt_chars}"
        raise DomainError(Reason.TOO_LARGE, message, field=path)
    if "\0" in text:
        raise refusal(path, "holds a zero character")
    return without_adapters(text)


def _size(asked: AskedOptions, defaults: Defaults, bounds: Bounds, size: tuple[int, int] | None) -> tuple[int, int]:
    most = bounds.pixels // LEAST_EDGE
    for name, value in (("width_px", asked.width), ("height_px", asked.height)):
        if value is not None:
            check_range(f"options.{name}", value, LEAST_EDGE, most)
    if (asked.width is None) != (asked.height is None):
        missing = "width_px" if asked.width is None else "height_px"
        raise refusal(f"options.{missing}", "is missing: width and height belong together")
    if asked.width is not None and asked.height is not None:
        width, height = asked.width, asked.height
        if width * height > bounds.pixels:
            raise refusal("options.width_px", f"times height is {width * height} pixels; the most is {bounds.pixels}")
        return width, height
    width, height = size or (defaults.width, defaults.height)
    if width * height > bounds.pixels:  # of a large picture to be edited: as large as can be made, in its proportions
        shrink = math.sqrt(bounds.pixels / (width * height))
        width, height = int(width * shrink), int(height * shrink)
    return max(LEAST_EDGE, width), max(LEAST_EDGE, height)
