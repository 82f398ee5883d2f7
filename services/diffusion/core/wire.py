"""What service and host processes say to each other. Pictures lie on a board (kit/hosts/board.py); messages say where."""

from typing import Final

import msgspec

from services.kit.hosts.core.messages import LoadFailed, Loading

PROGRAM: Final = "services.diffusion.host"
"""The module that is run for a host."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A picture on a board: rows of 8-bit samples, top row first, no padding."""

    offset: int
    width: int
    height: int
    channels: int

    @property
    def size(self) -> int:
        """Bytes of it."""
        return self.width * self.height * self.channels


class Tensors(msgspec.Struct, frozen=True, array_like=True):
    """Equally large blocks of 32-bit numbers on a board, one after the other."""

    offset: int
    count: int
    block_bytes: int

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.count * self.block_bytes


# ---- service -> host -----------------------------------------------------------------------------------------


class ImageConfig(msgspec.Struct, frozen=True, array_like=True, tag="image"):
    """First message to the host of an image model. `files`: paths by the engine's name for the part.

    `offload`: weights stay in the host's RAM and go to the device when needed. `max_vram_gib`: 0 for no bound. `native`: the
    library that watches the denoiser, empty for none. `prompts`, `prompt_bytes`: encoded prompts that are kept, at most.
    """

    files: dict[str, str]
    threads: int
    flash_attention: bool
    diffusion_flash_attention: bool
    offload: bool
    clip_on_cpu: bool
    vae_on_cpu: bool
    control_on_cpu: bool
    mmap: bool
    max_vram_gib: float
    native: str = ""
    prompts: int = 0
    prompt_bytes: int = 0


class UpscalerConfig(msgspec.Struct, frozen=True, array_like=True, tag="upscaler"):
    """First message to the host of an upscaler."""

    path: str
    threads: int
    offload: bool


class Tiling(msgspec.Struct, frozen=True, array_like=True):
    """How latents become pixels in tiles; sizes in latent cells, overlap as a part of a tile."""

    x: int
    y: int
    overlap: float


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How noise becomes a picture. Empty names and None: as the engine decides for the model."""

    steps: int
    guidance: float
    distilled_guidance: float | None
    sampler: str
    scheduler: str
    eta: float | None
    flow_shift: float | None


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """Make `count` pictures with seeds from `seed` on. `loras`: files with strengths. `previews`: of each picture at most.

    `replay`: what the denoiser gave in the first steps of the very same run. `record_steps`: steps whose results are to be
    handed over; 0 for none.
    """

    job: int
    prompt: str
    negative_prompt: str
    width: int
    height: int
    sampling: Sampling
    seed: int
    count: int
    clip_skip: int = -1
    loras: tuple[tuple[str, float], ...] = ()
    tiling: Tiling | None = None
    start: Region | None = None
    strength: float = 0.75
    mask: Region | None = None
    references: tuple[Region, ...] = ()
    control: Region | None = None
    control_strength: float = 0.9
    previews: int = 0
    replay: Tensors | None = None
    record_steps: int = 0


class Upscale(msgspec.Struct, frozen=True, array_like=True, tag="upscale"):
    """Enlarge a picture tile by tile."""

    job: int
    image: Region
    tile_px: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """End a job at the next step; it answers with Failed."""

    job: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Keep none of the encoded prompts."""


# ---- host -> service -----------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model serves. `version`: of the engine; `fingerprint`: of the files as they were loaded.

    `native`: runs can be ended, recorded and replayed; else `native_reason` says why not. `prompts_reason`: why encoded
    prompts are not kept, empty when they are. `factor`: of an upscaler.
    """

    version: str
    fingerprint: str
    device: str
    native: bool = False
    native_reason: str = ""
    prompts_reason: str = ""
    sampler: str = ""
    factor: int = 0


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """What a job is at. `phase`: conditioning, denoising, decoding or upscaling; `index`: of the picture within the job."""

    job: int
    phase: str
    index: int
    step: int
    steps: int


class Preview(msgspec.Struct, frozen=True, array_like=True, tag="preview"):
    """How a picture looks so far."""

    job: int
    index: int
    step: int
    image: Region


class Prompts(msgspec.Struct, frozen=True, array_like=True):
    """What a job did to the encoded prompts that the host keeps, and what there is of them after `clears` orders to forget."""

    encoded: int
    recalled: int
    evicted: int
    entries: int
    size_bytes: int
    clears: int


class Made(msgspec.Struct, frozen=True, array_like=True, tag="made"):
    """The end of a job: its pictures. `denoise_calls`: None when they could not be counted; `prompts`: when none are kept."""

    job: int
    images: tuple[Region, ...]
    inference_ms: int
    sampler: str = ""
    scheduler: str = ""
    denoise_calls: int | None = None
    recorded: Tensors | None = None
    prompts: Prompts | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The end of a job without pictures, although the host serves on. `cancelled`: as it was asked for.

    `field`: what in the request is at fault, by its path in the contract; empty when nothing is.
    """

    job: int
    message: str
    cancelled: bool = False
    field: str = ""


ToHost = ImageConfig | UpscalerConfig | Generate | Upscale | Cancel | Forget
FromHost = Loading | Ready | LoadFailed | Progress | Preview | Made | Failed
