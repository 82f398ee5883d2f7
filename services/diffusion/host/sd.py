"""stable-diffusion.cpp with types, through its C API: NULL becomes EngineError with what was logged, C memory is freed.

Of the Python package only the declarations of structures and functions are used. Callbacks of the engine are process-wide and
come on the thread that called it; one job runs at a time, so there is one watcher.
"""

import ctypes
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from services.diffusion.core.wire import Generate, ImageConfig, Tiling, UpscalerConfig
from services.kit.lean import inner

if TYPE_CHECKING:
    import stable_diffusion_cpp.stable_diffusion_cpp as c_api
else:
    c_api = inner("stable_diffusion_cpp.stable_diffusion_cpp")

_AT_RUNTIME: Final = 2
"""Adapters apply to one generation: the other modes do not restore the base weights."""
_WARNING: Final = 2
_PROJECTED: Final = 1
_BY_SMALL_DECODER: Final = 2
_BATCH: Final = re.compile(r"generating image: (\d+)/")
_APPLIED: Final = re.compile(r"\((\d+) / \d+\) LoRA tensors have been applied, lora_file_path = (.+)")
_BACKEND: Final = re.compile(r"[Uu]sing (\w+) backend")
_library = c_api._lib  # noqa: SLF001 - the binding declares not all functions
_libc = ctypes.CDLL(None)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.free.restype = None
for _name in ("sd_sample_method_name", "sd_scheduler_name"):
    getattr(_library, _name).restype = ctypes.c_char_p


class EngineError(Exception):
    """The engine refused; the message is what it logged."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Rows of 8-bit samples, top row first, no padding."""

    width: int
    height: int
    channels: int
    samples: bytes


class Watcher:
    """Hears what the engine does. `on_step`: phase, picture's place, steps done, steps in all; `on_preview`: place, step, picture.

    `applied`: how many tensors of each adapter found their place in the model.
    """

    def __init__(
        self,
        on_step: Callable[[str, int, int, int], None],
        on_preview: Callable[[int, int, Picture], None] | None = None,
    ) -> None:
        self._on_step = on_step
        self._on_preview = on_preview
        self._phase = "conditioning"
        self._index = 0
        self.applied: dict[str, int] = {}

    def logged(self, text: str) -> None:
        """Learn from the log which part of its work the engine is at: nothing else tells."""
        if (found := _BATCH.search(text)) is not None:
            self._phase, self._index = "denoising", int(found.group(1)) - 1
        elif (found := _APPLIED.search(text)) is not None:
            self.applied[found.group(2)] = max(int(found.group(1)), self.applied.get(found.group(2), 0))
        elif text.startswith("decoding "):
            self._phase, self._index = "decoding", 0
            self._on_step("decoding", 0, 0, 1)

    def stepped(self, step: int, steps: int) -> None:
        """Take a step of the present part."""
        self._on_step(self._phase, self._index, step, steps)

    def previewed(self, step: int, picture: Picture) -> None:
        """Take a picture so far."""
        if self._on_preview is not None:
            self._on_preview(self._index, step, picture)


_watcher: Watcher | None = None
_errors: deque[str] = deque(maxlen=4)
_seen: dict[str, str] = {}


@c_api.sd_log_callback  # type: ignore[untyped-decorator]
def _logged(level: int, text: bytes, _: object) -> None:
    said = (text or b"").decode("utf-8", "replace").strip()
    said = said.split(" - ", 1)[-1]  # what precedes names the line of the engine's source
    if level > _WARNING:
        _errors.append(said)
    if (found := _BACKEND.search(said)) is not None:
        _seen["device"] = found.group(1).lower()
    if _watcher is not None:
        _watcher.logged(said)


@c_api.sd_progress_callback  # type: ignore[untyped-decorator]
def _stepped(step: int, steps: int, _seconds: float, _: object) -> None:
    if _watcher is not None:
        _watcher.stepped(step, steps)


@c_api.sd_preview_callback  # type: ignore[untyped-decorator]
def _previewed(step: int, _count: int, frames: Any, _noisy: bool, _: object) -> None:  # noqa: ANN401, FBT001 - the engine's signature
    if _watcher is not None:
        _watcher.previewed(step, _copy(frames[0]))


c_api.sd_set_log_callback(_logged, None)
c_api.sd_set_progress_callback(_stepped, None)


def library_handle() -> int:
    """Return the handle of the engine's library."""
    return int(_library._handle)  # noqa: SLF001 - ctypes offers no other way


def engine_version() -> str:
    """Return what tells this engine from any other build."""
    package, commit = version("stable-diffusion-cpp-python"), _text(c_api.sd_commit())
    return package if commit == "unknown" else f"{package}+{commit}"


def device() -> str:
    """Return what the engine computes on, as far as it has said so."""
    return _seen.get("device", "cpu")


def forget_memory() -> None:
    """Have the C library give back what it keeps of freed memory."""
    _libc.malloc_trim(0)


@contextmanager
def _watched(watcher: Watcher | None) -> Iterator[None]:
    global _watcher  # noqa: PLW0603 - the engine's callbacks are process-wide
    _watcher = watcher
    _errors.clear()
    try:
        yield
    finally:
        _watcher = None


def _refusal(what: str) -> EngineError:
    said = "; ".join(dict.fromkeys(each for each in _errors if each))
    return EngineError(f"{what}: {said[-500:]}" if said else what)


def _copy(image: Any) -> Picture:  # noqa: ANN401 - a structure of the binding
    size = image.width * image.height * image.channel
    return Picture(image.width, image.height, image.channel, ctypes.string_at(image.data, size))


def _taken(image: Any) -> Picture:  # noqa: ANN401 - a structure of the binding
    """Return a picture of the engine's and free it."""
    picture = _copy(image)
    _libc.free(ctypes.cast(image.data, ctypes.c_void_p))
    return picture


class _Images:
    """Pictures as the engine reads them, and what keeps their memory alive."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def of(self, picture: Picture | None) -> Any:  # noqa: ANN401 - a structure of the binding
        if picture is None:
            return c_api.sd_image_t(0, 0, 0, None)
        memory = (ctypes.c_uint8 * len(picture.samples)).from_buffer_copy(picture.samples)
        self._kept.append(memory)
        data = ctypes.cast(memory, ctypes.POINTER(ctypes.c_uint8))
        return c_api.sd_image_t(picture.width, picture.height, picture.channels, data)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Pictures that a generation starts from."""

    start: Picture | None = None
    mask: Picture | None = None
    references: Sequence[Picture] = ()
    control: Picture | None = None


class ImageModel:
    """A loaded image model."""

    def __init__(self, config: ImageConfig) -> None:
        """Load it. Raises EngineError."""
        params = c_api.sd_ctx_params_t()
        _library.sd_ctx_params_init(ctypes.byref(params))
        _set(params, {f"{part}_path": path.encode() for part, path in config.files.items()})
        params.vae_decode_only = False
        params.free_params_immediately = False
        params.n_threads = config.threads
        params.lora_apply_mode = _AT_RUNTIME
        params.flash_attn = config.flash_attention
        params.diffusion_flash_attn = config.diffusion_flash_attention
        params.offload_params_to_cpu = config.offload
        params.keep_clip_on_cpu = config.clip_on_cpu
        params.keep_vae_on_cpu = config.vae_on_cpu
        params.keep_control_net_on_cpu = config.control_on_cpu
        params.enable_mmap = config.mmap
        params.max_vram = config.max_vram_gib
        with _watched(None):
            self._context = c_api.new_sd_ctx(ctypes.byref(params))
            if not self._context:
                raise _refusal("the engine does not load these files")
            if not c_api.sd_ctx_supports_image_generation(self._context):
                raise _refusal("the model makes no pictures")
        self._small_decoder = "taesd" in config.files
        forget_memory()

    def default_sampler(self) -> str:
        """Return the name of the sampler for a request that names none."""
        return _text(_library.sd_sample_method_name(c_api.sd_get_default_sample_method(self._context)))

    def chosen(self, sampler: str, scheduler: str) -> tuple[str, str]:
        """Return the names of sampler and scheduler as they will be used; empty ones are the model's."""
        named = sampler or self.default_sampler()
        method = _library.str_to_sample_method(named.encode())
        schedule = scheduler or _text(_library.sd_scheduler_name(c_api.sd_get_default_scheduler(self._context, method)))
        return named, schedule

    def generate(self, asked: Generate, inputs: Inputs, watcher: Watcher) -> list[Picture]:
        """Make pictures. Raises EngineError; when the run was ended from outside, too."""
        params, kept = self._params(asked, inputs)
        previews = c_api.sd_preview_callback() if asked.previews == 0 else _previewed
        mode = (_BY_SMALL_DECODER if self._small_decoder else _PROJECTED) if asked.previews else 0
        interval = max(1, asked.sampling.steps // (asked.previews + 1))
        c_api.sd_set_preview_callback(previews, mode, interval, True, False, None)  # noqa: FBT003 - the engine's signature
        with _watched(watcher):
            found = c_api.generate_image(self._context, ctypes.byref(params))
            del kept
            if not found:
                raise _refusal("the engine made no picture")
            try:
                return [_taken(found[place]) for place in range(asked.count)]
            finally:
                _libc.free(ctypes.cast(found, ctypes.c_void_p))

    def _params(self, asked: Generate, inputs: Inputs) -> tuple[Any, list[Any]]:
        params, images = c_api.sd_img_gen_params_t(), _Images()
        _library.sd_img_gen_params_init(ctypes.byref(params))
        loras = (c_api.sd_lora_t * max(1, len(asked.loras)))(
            *(c_api.sd_lora_t(False, scale, path.encode()) for path, scale in asked.loras)  # noqa: FBT003 - a structure
        )
        references = (c_api.sd_image_t * max(1, len(inputs.references)))(*map(images.of, inputs.references))
        params.loras, params.lora_count = loras, len(asked.loras)
        params.prompt, params.negative_prompt = asked.prompt.encode(), asked.negative_prompt.encode()
        params.clip_skip = asked.clip_skip
        params.width, params.height = asked.width, asked.height
        params.seed, params.batch_count = asked.seed, asked.count
        params.init_image, params.mask_image = images.of(inputs.start), images.of(inputs.mask)
        params.ref_images, params.ref_images_count = references, len(inputs.references)
        params.auto_resize_ref_image = True
        params.strength = asked.strength
        params.control_image, params.control_strength = images.of(inputs.control), asked.control_strength
        if asked.tiling is not None:
            params.vae_tiling_params = _tiling(asked.tiling)
        self._sampling(params.sample_params, asked)
        return params, [loras, references, images]

    def _sampling(self, params: Any, asked: Generate) -> None:  # noqa: ANN401 - a structure of the binding
        sampling = asked.sampling
        sampler, scheduler = self.chosen(sampling.sampler, sampling.scheduler)
        params.sample_method = _library.str_to_sample_method(sampler.encode())
        params.scheduler = _library.str_to_scheduler(scheduler.encode())
        params.sample_steps = sampling.steps
        params.guidance.txt_cfg = sampling.guidance
        if sampling.distilled_guidance is not None:
            params.guidance.distilled_guidance = sampling.distilled_guidance
        params.eta = math.inf if sampling.eta is None else sampling.eta
        params.flow_shift = math.inf if sampling.flow_shift is None else sampling.flow_shift


class UpscalerModel:
    """A loaded upscaler."""

    def __init__(self, config: UpscalerConfig) -> None:
        """Load it. Raises EngineError."""
        with _watched(None):
            self._context = c_api.new_upscaler_ctx(config.path.encode(), config.offload, False, config.threads, 0)  # noqa: FBT003
            if not self._context:
                raise _refusal("the engine does not load this upscaler")
        self.factor = int(c_api.get_upscale_factor(self._context))

    def enlarge(self, picture: Picture) -> Picture:
        """Return a picture of three channels, enlarged as a whole. Raises EngineError."""
        images = _Images()
        with _watched(None):
            found = c_api.upscale(self._context, images.of(picture), self.factor)
            if not found.data:
                raise _refusal("the engine did not enlarge the picture")
            return _taken(found)


def _set(params: Any, values: Mapping[str, Any]) -> None:  # noqa: ANN401 - a structure of the binding
    for name, value in values.items():
        setattr(params, name, value)


def _tiling(tiling: Tiling) -> Any:  # noqa: ANN401 - a structure of the binding
    return c_api.sd_tiling_params_t(True, tiling.x, tiling.y, tiling.overlap, 0.0, 0.0)  # noqa: FBT003 - a structure


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
