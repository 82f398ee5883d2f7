"""The pictures that a request starts from: decoded, checked, and in the size that is made."""

from dataclasses import dataclass
from typing import Final

from PIL import Image

from services.diffusion.adapters import pictures
from services.diffusion.adapters.engine import Pixels
from services.diffusion.core.family import Family
from services.diffusion.core.options import check_range, refusal
from services.kit.errors import DomainError, Reason

Given = bytes | Pixels
"""A picture as the caller gave it: a file or samples."""
MOST_IMAGES: Final = 16
_EDIT_STRENGTH: Final = 0.75
_CONTROL_STRENGTH: Final = 0.9
_REFERENCES_ONLY: Final = frozenset({"flux2", "qwen-image"})


@dataclass(frozen=True, slots=True)
class Sources:
    """What a request brings along; None: not said. `field`: what its pictures are called in the contract."""

    images: tuple[Given, ...] = ()
    field: str = "images"
    mask: Given | None = None
    strength: float | None = None
    reference_strength: float | None = None
    control: Given | None = None
    control_strength: float | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A request's pictures, decoded. `size`: of the first, None without any."""

    images: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    control: Image.Image | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        """Columns and rows of the first picture."""
        return self.images[0].size if self.images else None


@dataclass(frozen=True, slots=True)
class Scene:
    """What the engine starts from."""

    start: Pixels | None = None
    mask: Pixels | None = None
    references: tuple[Pixels, ...] = ()
    control: Pixels | None = None
    strength: float = _EDIT_STRENGTH
    control_strength: float = _CONTROL_STRENGTH


def open_sources(sources: Sources, family: Family, *, has_control: bool, most_pixels: int) -> Opened:
    """Decode what a request brings along. Raises DomainError, naming the field, for what is wrong or the model cannot do."""
    for name in ("strength", "control_strength"):
        value = getattr(sources, name)
        if value is not None:
            check_range(name, value, 0, 1)
    if sources.reference_strength is not None:
        raise _unsupported("reference_strength", "no model here weighs its references")
    if sources.control is not None and not has_control:
        raise _unsupported("control", "there is no control network; OMNISERVE_SD_CONTROL_NET names one")
    if len(sources.images) > MOST_IMAGES:
        raise refusal(sources.field, f"has {len(sources.images)} pictures; 1 to {MOST_IMAGES} are allowed")
    if len(sources.images) > 1 and not family.edits:
        raise _unsupported(sources.field, f"a {family.name} model takes one picture, it has no references")
    paths = (
        [sources.field] if len(sources.images) == 1 else [f"{sources.field}[{n}]" for n in range(len(sources.images))]
    )
    images = tuple(_opened(each, path, most_pixels) for each, path in zip(sources.images, paths, strict=True))
    mask = None if sources.mask is None else _opened(sources.mask, "mask", most_pixels)
    if mask is not None and images and mask.size != images[0].size:
        (width, height), (wide, high) = mask.size, images[0].size
        raise refusal("mask", f"is {width} x {height} pixels; the first picture is {wide} x {high}")
    control = None if sources.control is None else _opened(sources.control, "control", most_pixels)
    return Opened(images, mask, control)


def scene(opened: Opened, sources: Sources, family: Family, *, width: int, height: int) -> Scene:
    """Return what the engine starts from, in the size that is made."""
    is_start = not (family.name in _REFERENCES_ONLY and opened.mask is None and sources.strength is None)
    first, rest = (opened.images[:1], opened.images[1:]) if is_start else ((), opened.images)
    return Scene(
        start=_fitted(first[0], width, height) if first else None,
        mask=_mask(opened.mask, width, height),
        references=tuple(pictures.to_pixels(each, channels=3) for each in rest),
        control=None if opened.control is None else _fitted(opened.control, width, height),
        strength=_EDIT_STRENGTH if sources.strength is None else sources.strength,
        control_strength=_CONTROL_STRENGTH if sources.control_strength is None else sources.control_strength,
    )


def _opened(given: Given, field: str, most_pixels: int) -> Image.Image:
    if isinstance(given, bytes):
        return pictures.decode(given, field, most_pixels=most_pixels)
    return pictures.from_samples(given, field, most_pixels=most_pixels)


def _fitted(picture: Image.Image, width: int, height: int) -> Pixels:
    return pictures.to_pixels(pictures.scaled(picture, width, height), channels=3)


def _mask(mask: Image.Image | None, width: int, height: int) -> Pixels | None:
    if mask is None:
        return None
    return pictures.to_pixels(pictures.scaled(pictures.painted(mask), width, height), channels=1)


def _unsupported(field: str, message: str) -> DomainError:
    return DomainError(Reason.UNSUPPORTED, f"'{field}': {message}", field=field)
