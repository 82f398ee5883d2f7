"""Settings of diffusion: every knob once."""

from pathlib import Path
from typing import ClassVar, Final, Literal, Self

import psutil
from pydantic import model_validator

from services.kit.config import config_knob
from services.kit.settings import Address, MeshSettings, knob

DEFAULT_UPSCALER: Final = "realesrgan-x4plus.safetensors"
"""What set-up puts into the models folder."""
_ROOT: Final = Path(__file__).resolve().parents[2]
_BACKEND_PARTS: Final = frozenset({"diffusion", "clip", "vae", "control"})


def _part(sentence: str, name: str) -> Path | None:
    found: Path | None = knob(None, sentence, aliases=(f"OMNISERVE_SD_{name}",))
    return found


class DiffusionSettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "diffusion"

    listen: Address = knob("127.0.0.1:9104", "Where the service listens.")
    config: Path | None = config_knob()
    model: Path | None = _part("Checkpoint of an image model that holds all its parts, safetensors or GGUF.", "MODEL")
    diffusion_model: Path | None = _part(
        "Diffusion model of an image model whose parts are files of their own.", "DIFFUSION_MODEL"
    )
    vae: Path | None = _part("Decoder of the image model, when it is a file of its own.", "VAE")
    taesd: Path | None = _part("Small decoder to use instead of the model's own: faster, less exact.", "TAESD")
    clip_l: Path | None = _part("CLIP-L text encoder of the image model.", "CLIP_L")
    clip_g: Path | None = _part("CLIP-G text encoder of the image model.", "CLIP_G")
    t5xxl: Path | None = _part("T5 text encoder of the image model.", "T5XXL")
    llm: Path | None = _part("Language model that encodes the image model's prompts.", "LLM")
    llm_vision: Path | None = _part("Vision part of that language model, for reference pictures.", "LLM_VISION")
    control_net: Path | None = _part("Control network of the image model.", "CONTROL_NET")
    upscaler: str = knob(
        "",
        "ESRGAN network that enlarges pictures; without it Real-ESRGAN x4plus, if set-up has put it into the models folder; "
        "`none`: no model.",
        aliases=("OMNISERVE_SD_UPSCALER",),
    )
    models_dir: Path = knob(
        _ROOT / "models", "Folder of the model files that set-up makes.", aliases=("OMNISERVE_MODELS_DIR",)
    )
    model_name: str = knob("", "Name callers use for the image model; empty means its file's name without its ending.")
    model_aliases: tuple[str, ...] = knob((), "Further names for the image model, separated by commas.")
    preload: bool = knob(
        False,  # noqa: FBT003 - the default
        "Load the image model at the start, and be ready only with it, instead of at the first request.",
    )
    ttl_s: float = knob(0.0, "How long an idle model stays in memory; 0 is until others need the room.", unit="s", ge=0)
    pin: bool = knob(False, "Never unload the image model to make room.")  # noqa: FBT003 - the default
    params_backend: str = knob(
        "",
        "Parts whose weights stay in the host's RAM, as `part=cpu` separated by commas: `diffusion`, `clip`, `vae`, `control`.",
        aliases=("OMNISERVE_SD_PARAMS_BACKEND",),
    )
    max_vram_mib: int = knob(
        0,
        "Device memory the engine may compute in; it cuts its graphs to fit. 0 is without bound.",
        unit="MiB",
        aliases=("OMNISERVE_SD_MAX_VRAM",),
        ge=0,
    )
    stream_layers: bool = knob(
        False,  # noqa: FBT003 - the default
        "Keep all weights in the host's RAM and bring them to the device as they are needed.",
        aliases=("OMNISERVE_SD_STREAM_LAYERS",),
    )
    mmap: bool = knob(False, "Map weights into memory instead of reading them.")  # noqa: FBT003 - the default
    flash_attn: bool = knob(
        True,  # noqa: FBT003 - the default
        "Flash attention in text encoders and decoder.",
        aliases=("OMNISERVE_SD_FLASH_ATTN",),
    )
    diffusion_flash_attn: bool = knob(
        True,  # noqa: FBT003 - the default
        "Flash attention in the diffusion model.",
        aliases=("OMNISERVE_SD_DIFFUSION_FLASH_ATTN",),
    )
    vae_tiling: bool = knob(
        False,  # noqa: FBT003 - the default
        "Decode in tiles when a request does not say: less memory, and slightly other pixels.",
        aliases=("OMNISERVE_SD_VAE_TILING",),
    )
    vae_tile_x: int = knob(
        32, "Width of such a tile, in cells of the latent.", aliases=("OMNISERVE_SD_VAE_TILE_X",), ge=8, le=512
    )
    vae_tile_y: int = knob(
        32, "Height of such a tile, in cells of the latent.", aliases=("OMNISERVE_SD_VAE_TILE_Y",), ge=8, le=512
    )
    vae_tile_overlap: float = knob(
        0.5, "How much of a tile overlaps its neighbour.", aliases=("OMNISERVE_SD_VAE_TILE_OVERLAP",), ge=0, le=0.9
    )
    zero_guidance: float = knob(
        0.0,
        "What a request's guidance of exactly 0 becomes; other values never change. 0 leaves it.",
        aliases=("OMNISERVE_SD_ZERO_GUIDANCE",),
        ge=0,
        le=100,
    )
    image_format: Literal["webp", "png", "jpeg"] = knob(
        "webp", "Format of pictures when a request names none.", aliases=("OMNISERVE_SD_IMAGE_FORMAT",)
    )
    webp_quality: int = knob(
        90, "Quality of WebP and JPEG when a request names none.", aliases=("OMNISERVE_SD_WEBP_QUALITY",), ge=1, le=100
    )
    webp_effort: int = knob(4, "Effort of WebP when a request names none: 0 is fast, 6 small.", ge=0, le=6)
    embed_parameters: bool = knob(
        True,  # noqa: FBT003 - the default
        "Write prompt, seed and settings into the file when a request does not say.",
    )
    max_batch: int = knob(
        1,
        "Pictures made in one call of the engine; more are made one call after the other under one permit.",
        aliases=("OMNISERVE_SD_MAX_BATCH",),
        ge=1,
        le=8,
    )
    steps: int = knob(0, "Denoising steps when a request names none; 0 is as the model's kind has it.", ge=0, le=150)
    guidance: float = knob(
        -1.0, "Guidance when a request names none; negative is as the model's kind has it.", ge=-1, le=100
    )
    width: int = knob(
        0, "Columns when a request names none; 0 is as the model's kind has it.", unit="pixels", ge=0, le=8192
    )
    height: int = knob(
        0, "Rows when a request names none; 0 is as the model's kind has it.", unit="pixels", ge=0, le=8192
    )
    max_pixels: int = knob(4_194_304, "Largest picture that is made.", unit="pixels", ge=4096, le=67_108_864)
    max_input_pixels: int = knob(
        33_554_432,
        "Largest picture that is taken, and the largest that comes out of upscaling.",
        unit="pixels",
        ge=4096,
    )
    prompt_chars: int = knob(32_000, "Longest prompt.", unit="characters", ge=100, le=1_000_000)
    variation_strength: float = knob(
        0.6, "How far a variation leaves its picture when the request does not say.", gt=0, le=1
    )
    upscale_tile: int = knob(
        128,
        "Edge of the tiles in which pictures are enlarged when a request names none.",
        unit="pixels",
        ge=32,
        le=2048,
    )
    lora_dir: Path | None = knob(
        None, "Folder of the adapters that callers may name; absent means none.", aliases=("OMNISERVE_LORA_DIR",)
    )
    teleport_cache_size: int = knob(
        64,
        "Runs whose pictures and latents are kept for exact replay; 0 keeps none.",
        aliases=("OMNISERVE_SD_TELEPORT_CACHE_SIZE",),
        ge=0,
        le=256,
    )
    teleport_cache_mib: int = knob(512, "Memory for them.", unit="MiB", ge=1)
    prompt_cache_mib: int = knob(
        128,
        "Memory in which the process of each model keeps encoded prompts, as many as runs at most.",
        unit="MiB",
        ge=1,
    )
    teleport_start_step: int = knob(
        7,
        "Step from which a replayed run is computed when a request names none, cut to the last.",
        aliases=("OMNISERVE_SD_TELEPORT_START_STEP",),
        ge=0,
        le=150,
    )
    threads: int = knob(0, "Threads that compute; 0 means the physical cores this process may use.", ge=0, le=512)
    native_tap: Path | None = knob(
        None,
        "Library that watches the denoiser, for cancelling at the next step and exact replay; by default the one that set-up builds.",
    )
    memory_mib: int = knob(0, "Memory of all loaded models together; 0 is without limit.", unit="MiB", ge=0)
    lease_memory: bool = knob(
        False,  # noqa: FBT003 - the default
        "Whether memory is leased from the broker (OMNISERVE_VRAM_ADDRESS) before a model is loaded.",
    )
    lease_device: str = knob("", "Device whose memory is leased; without it the one that the broker chooses.")
    lease_tenant: str = knob(
        "diffusion", "Name under which memory is leased; every process of this service needs its own."
    )
    coordinators: tuple[str, ...] = knob(
        (),
        "Processes on the same device, as bases of their addresses, separated by commas: before a model is loaded each is asked "
        "in turn to begin nothing (`POST /admin/hold?seconds=N`), and afterwards released in reverse order.",
    )
    coordinator_timeout_s: float = knob(
        180.0, "How long each of them may take to say that it holds.", unit="s", gt=0, le=3600
    )
    turn_s: float = knob(
        3.0,
        "How long a loaded model serves before it makes room for another that is waited for; at least as long as loading it took.",
        unit="s",
        ge=0,
        le=3600,
    )
    unload_wait_s: float = knob(
        60.0, "How long an unload waits for running requests when it names no time.", unit="s", ge=0, le=3600
    )
    load_wait_s: float = knob(
        120.0, "How long a request waits for a model that is loading or restarting.", unit="s", ge=0, le=3600
    )
    load_timeout_s: float = knob(900.0, "A load that takes longer is given up and begun again.", unit="s", gt=0)
    stuck_s: float = knob(
        600.0, "An engine that finishes no step for so long is killed and started again; 0 means never.", unit="s", ge=0
    )
    cancel_s: float = knob(
        30.0,
        "An engine that has not ended a cancelled request for so long is killed and started again.",
        unit="s",
        ge=0,
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.model is not None and self.diffusion_model is not None:
            raise ValueError(
                "OMNISERVE_SD_MODEL and OMNISERVE_SD_DIFFUSION_MODEL both name the image model; keep one of them"
            )
        for base in self.coordinators:
            if not base.startswith(("http://", "https://")):
                raise ValueError(f"OMNISERVE_DIFFUSION_COORDINATORS: {base!r} is no http:// or https:// address")
        unknown = self.parts_on_cpu() - _BACKEND_PARTS
        if unknown:
            raise ValueError(
                f"OMNISERVE_SD_PARAMS_BACKEND names {min(unknown)!r}; {', '.join(sorted(_BACKEND_PARTS))} are known, each as `part=cpu`"
            )
        return self

    def parts_on_cpu(self) -> frozenset[str]:
        """Return the parts whose weights stay in the host's RAM."""
        pairs = [each.strip() for each in self.params_backend.split(",") if each.strip()]
        return frozenset(pair.removesuffix("=cpu") for pair in pairs)

    def upscaler_path(self) -> Path | None:
        """Return the upscaler's file: the one that is set, or the default if set-up has made it."""
        if self.upscaler == "none":
            return None
        if self.upscaler:
            return Path(self.upscaler)
        default = self.models_dir / DEFAULT_UPSCALER
        return default if default.exists() else None

    def lora_copies(self) -> Path:
        """Return the folder where the engine reads adapters."""
        return self.state_dir / "diffusion" / "loras"

    def compute_threads(self) -> int:
        """Return the threads to compute with."""
        allowed = len(psutil.Process().cpu_affinity())
        return self.threads or max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
