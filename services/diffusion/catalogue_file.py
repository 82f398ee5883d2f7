"""The models to serve: those of omniserve.yaml, or else those of the settings."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from services.diffusion.core.catalogue import Entry, Kind
from services.diffusion.sections import PictureModels, PictureModelSection, is_picture_model
from services.diffusion.served import Broken, Served, read_image, read_upscaler
from services.diffusion.settings import DiffusionSettings
from services.kit import config
from services.kit.config import ConfigError, Document, Fault

_FILES: Final = (
    "diffusion_model", "vae", "taesd", "clip_l", "clip_g", "t5xxl", "llm", "llm_vision", "control_net",
)  # fmt: skip
_OTHERS: Final = (
    "width", "height", "steps", "guidance", "zero_guidance", "vae_tiling", "flash_attn", "diffusion_flash_attn", "mmap",
    "stream_layers", "max_vram_mib", "threads", "ttl_s", "pin", "preload",
)  # fmt: skip


def read_catalogue(settings: DiffusionSettings) -> tuple[Served | Broken, ...]:
    """Return the models, of each kind the default one first. Raises ConfigError with the line."""
    document = config.read(settings.config).without("models", lambda each: not is_picture_model(each))
    sections = document.section("models", PictureModels) or ()
    faults = list(_faults(document, sections, settings))
    if faults:
        raise ConfigError(faults)
    folder = Path(document.file).parent
    found = [_read(settings, folder, each) for each in sections]
    kinds = {each.kind for each in sections}
    if "image" not in kinds:
        found.insert(0, read_image(settings))
    if "upscaler" not in kinds:
        found.append(read_upscaler(settings))
    return tuple(each for each in found if each is not None)


def _faults(document: Document, sections: PictureModels, settings: DiffusionSettings) -> Iterator[Fault]:
    if any(each.kind == "image" for each in sections) and (settings.model or settings.diffusion_model):
        message = "and OMNISERVE_SD_MODEL or OMNISERVE_SD_DIFFUSION_MODEL both say what is served; keep one of them"
        yield document.fault(("models",), message)
    if any(each.kind == "upscaler" for each in sections) and settings.upscaler not in ("", "none"):
        yield document.fault(("models",), "and OMNISERVE_SD_UPSCALER both say what enlarges; keep one of them")
    owners: dict[str, int] = {}
    for place, section in enumerate(sections):
        for name in (section.name, *section.aliases):
            owner = owners.setdefault(name, place)
            if owner != place:
                field = "name" if name == section.name else "aliases"
                message = f"{name!r} is a name of {sections[owner].name!r} already"
                yield document.fault(("models", place, field), message)


def _read(settings: DiffusionSettings, folder: Path, section: PictureModelSection) -> Served | Broken | None:
    named = Entry(section.name, tuple(dict.fromkeys(section.aliases)), Kind(section.kind))
    own = {name: value for name in _OTHERS if (value := getattr(section, name)) is not None}
    if section.kind == "upscaler":
        own["upscaler"] = str(_path(folder, section.path))
        return read_upscaler(settings.model_copy(update=own), named)
    files = {name: _path(folder, getattr(section, name)) for name in _FILES}
    return read_image(settings.model_copy(update={**own, **files, "model": _path(folder, section.path)}), named)


def _path(folder: Path, path: Path | None) -> Path | None:
    return None if path is None else folder / path.expanduser()


def split(found: Sequence[Served | Broken]) -> tuple[tuple[Served, ...], tuple[Broken, ...]]:
    """Return those that can be served, and those that cannot."""
    return (
        tuple(each for each in found if isinstance(each, Served)),
        tuple(each for each in found if isinstance(each, Broken)),
    )
