"""The pictures' part of the section `models` of omniserve.yaml as it is written: entries of these kinds."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

KINDS: Final = ("image", "upscaler")
"""Entries of other kinds are other services'."""
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s\x00-\x1f]+( [^\s\x00-\x1f]+)*$")]
Edge = Annotated[int, Field(ge=64, le=8192)]
_FOR_IMAGES: Final = (
    "diffusion_model", "vae", "taesd", "clip_l", "clip_g", "t5xxl", "llm", "llm_vision", "control_net", "width", "height",
    "steps", "guidance", "zero_guidance", "vae_tiling", "flash_attn", "diffusion_flash_attn", "mmap", "max_vram_mib", "preload",
)  # fmt: skip


def is_picture_model(entry: Any) -> bool:  # noqa: ANN401 - as it stands in the file
    """Return whether an entry of the section is this service's."""
    return isinstance(entry, dict) and entry.get("kind") in KINDS


class PictureModelSection(BaseModel):
    """One model. What is absent is as the service's settings say; paths are relative to the file's folder.

    `path`: a checkpoint with all parts, or an upscaler; `diffusion_model` and the parts after it: files of their own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Name
    kind: Literal["image", "upscaler"]
    aliases: tuple[Name, ...] = ()
    path: Path | None = None
    diffusion_model: Path | None = None
    vae: Path | None = None
    taesd: Path | None = None
    clip_l: Path | None = None
    clip_g: Path | None = None
    t5xxl: Path | None = None
    llm: Path | None = None
    llm_vision: Path | None = None
    control_net: Path | None = None
    width: Edge | None = None
    height: Edge | None = None
    steps: int | None = Field(default=None, ge=1, le=150)
    guidance: float | None = Field(default=None, ge=0, le=100)
    zero_guidance: float | None = Field(default=None, ge=0, le=100)
    vae_tiling: bool | None = None
    flash_attn: bool | None = None
    diffusion_flash_attn: bool | None = None
    mmap: bool | None = None
    stream_layers: bool | None = None
    max_vram_mib: int | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=0, le=512)
    ttl_s: float | None = Field(default=None, ge=0)
    pin: bool = False
    preload: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.kind == "upscaler":
            for name in _FOR_IMAGES:
                if getattr(self, name) not in (None, False):
                    raise ValueError(f"has `{name}`, which is for models of kind image")
            if self.path is None:
                raise ValueError("needs `path`")
        elif (self.path is None) == (self.diffusion_model is None):
            raise ValueError("needs either `path`, a file with all parts, or `diffusion_model`")
        return self


PictureModels = tuple[PictureModelSection, ...]
