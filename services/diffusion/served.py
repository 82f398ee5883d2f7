"""The models that the settings ask for: each with everything that is decided before it is loaded."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from services.diffusion.adapters import model_file
from services.diffusion.adapters.model_file import ModelFile, ModelFileError
from services.diffusion.core.catalogue import Entry, Kind, entry
from services.diffusion.core.family import Family, check_part, family_of, is_complete, upscaler_factor
from services.diffusion.core.header import HeaderError
from services.diffusion.core.options import Defaults, Encoding, Format
from services.diffusion.core.wire import ImageConfig, Tiling, UpscalerConfig
from services.diffusion.native.build import LIBRARY
from services.diffusion.settings import DiffusionSettings

MIB: Final = 1024 * 1024
_PROFILE_CHARACTERS: Final = 32
_SCRATCH_SHARE: Final = 0.25
"""What a step takes beside the weights, as a part of them, until it was measured."""
_LEAST_SCRATCH_MIB: Final = 64
_PARTS: Final = ("vae", "taesd", "clip_l", "clip_g", "t5xxl", "llm", "llm_vision", "control_net")


@dataclass(frozen=True, slots=True)
class Served:
    """A model of the catalogue. `parts`: its files by the engine's names; `family`: None for an upscaler."""

    entry: Entry
    parts: dict[str, ModelFile]
    config: ImageConfig | UpscalerConfig
    family: Family | None
    defaults: Defaults
    factor: int = 0
    ttl_s: float = 0.0
    pinned: bool = False
    preload: bool = False

    @property
    def name(self) -> str:
        """What callers call it."""
        return self.entry.name

    @property
    def modality(self) -> str:
        """What its requests ask admission for."""
        return "image"

    @property
    def required(self) -> bool:
        """Whether the service is ready only with it."""
        return self.preload

    @property
    def files(self) -> tuple[str, ...]:
        """Its files."""
        return tuple(str(each.path) for each in self.parts.values())

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(each.size for each in self.parts.values())

    @property
    def need_mib(self) -> int:
        """Memory it takes, MiB: its weights, and some to compute in."""
        weights_mib = -(-self.size // MIB)
        return weights_mib + max(_LEAST_SCRATCH_MIB, round(weights_mib * _SCRATCH_SHARE))

    @property
    def profile(self) -> str:
        """What tells this way of running it from another."""
        said = msgspec.json.encode((self.config, [(each.size, each.made_unix_s) for each in self.parts.values()]))
        return hashlib.sha256(said).hexdigest()[:_PROFILE_CHARACTERS]

    @property
    def file_mib(self) -> int:
        """Size of its files as far as they are mapped, MiB."""
        mapped = isinstance(self.config, ImageConfig) and self.config.mmap
        return -(-self.size // MIB) if mapped else 0

    @property
    def on_host(self) -> bool:
        """Whether its weights stay in the host's RAM."""
        return self.config.offload

    @property
    def made_unix_s(self) -> int:
        """When its newest file was changed, seconds since 1970."""
        return max(each.made_unix_s for each in self.parts.values())

    def lease_mib(self, *, seen_mib: int | None, on_host: bool) -> int:  # noqa: ARG002 - kit's signature
        """Return how much memory to lease: as much as it was seen to take, or as its files say."""
        return self.need_mib if seen_mib is None else max(seen_mib, -(-self.size // MIB))

    def runs_like(self, other: "Served") -> bool:
        """Return whether a host of this one is as good for the other."""
        return (self.config, self.parts) == (other.config, other.parts)


@dataclass(frozen=True, slots=True)
class Broken:
    """A model of the catalogue that cannot be served, and why."""

    entry: Entry
    why: str


def read_image(settings: DiffusionSettings, named: Entry | None = None) -> Served | Broken | None:
    """Return the image model of the settings, under its own or the given name; None when they name none."""
    main = settings.model or settings.diffusion_model
    if main is None:
        return None
    if named is None:
        named = entry(main.stem, Kind.IMAGE, name=settings.model_name, aliases=settings.model_aliases)
    try:
        return _image(settings, named, main)
    except ModelFileError as error:
        return Broken(named, str(error))


def _image(settings: DiffusionSettings, named: Entry, main: Path) -> Served:
    file = model_file.read(main)
    parts = {"model" if settings.model is not None else "diffusion_model": file}
    try:
        family = family_of(file.header)
    except HeaderError as error:
        raise ModelFileError(f"{main.name}: {error}") from error
    for part in _PARTS:
        path: Path | None = getattr(settings, part)
        if path is not None:
            parts[part] = _part(path, part)
    if settings.diffusion_model is not None and not is_complete(file.header):
        missing = [f"OMNISERVE_SD_{part.upper()}" for part in family.encoders if part not in parts]
        if not {"vae", "taesd"} & parts.keys():
            missing.append("OMNISERVE_SD_VAE")
        if missing:
            raise ModelFileError(f"{main.name} is a {family.name} model and needs further files: {', '.join(missing)}")
    on_cpu = settings.parts_on_cpu()
    config = ImageConfig(
        files={part: str(each.path) for part, each in parts.items()},
        threads=settings.compute_threads(),
        flash_attention=settings.flash_attn,
        diffusion_flash_attention=settings.diffusion_flash_attn,
        offload=settings.stream_layers or "diffusion" in on_cpu,
        clip_on_cpu="clip" in on_cpu,
        vae_on_cpu="vae" in on_cpu,
        control_on_cpu="control" in on_cpu,
        mmap=settings.mmap,
        max_vram_gib=settings.max_vram_mib / 1024,
        native=str(settings.native_tap or LIBRARY),
        prompts=settings.teleport_cache_size,
        prompt_bytes=settings.prompt_cache_mib * MIB,
    )
    return Served(
        entry=named,
        parts=parts,
        config=config,
        family=family,
        defaults=_defaults(settings, family),
        ttl_s=settings.ttl_s,
        pinned=settings.pin,
        preload=settings.preload,
    )


def _part(path: Path, part: str) -> ModelFile:
    file = model_file.read(path)
    try:
        check_part(file.header, part)
    except HeaderError as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    return file


def read_upscaler(settings: DiffusionSettings, named: Entry | None = None) -> Served | Broken | None:
    """Return the upscaler of the settings, under its own or the given name; None when they name none."""
    path, is_own = settings.upscaler_path(), named is not None  # else the settings' pin is the image model's
    if path is None:
        return None
    named = entry(path.stem, Kind.UPSCALER) if named is None else named
    try:
        file = model_file.read(path)
        factor = upscaler_factor(file.header)
    except ModelFileError as error:
        return Broken(named, str(error))
    except HeaderError as error:
        return Broken(named, f"{path.name}: {error}")
    return Served(
        entry=named,
        parts={"model": file},
        config=UpscalerConfig(str(file.path), settings.compute_threads(), offload=settings.stream_layers),
        family=None,
        defaults=_defaults(settings, None),
        factor=factor,
        ttl_s=settings.ttl_s,
        pinned=is_own and settings.pin,
    )


def _defaults(settings: DiffusionSettings, family: Family | None) -> Defaults:
    size_px = family.size_px if family is not None else 0
    steps = settings.steps or (family.steps if family is not None else 0)
    own_guidance = family.guidance if family is not None else 0.0
    return Defaults(
        width=settings.width or size_px,
        height=settings.height or size_px,
        steps=steps,
        guidance=settings.guidance if settings.guidance >= 0 else own_guidance,
        zero_guidance=settings.zero_guidance,
        tiling=Tiling(settings.vae_tile_x, settings.vae_tile_y, settings.vae_tile_overlap),
        tiles=settings.vae_tiling,
        encoding=Encoding(
            Format[settings.image_format.upper()],
            settings.webp_quality,
            settings.webp_effort,
            settings.embed_parameters,
        ),
    )
