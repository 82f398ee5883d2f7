"""Which architecture a model file holds, by the tensors in it, and what that architecture needs and can do.

The engine tells architectures by the same names (its `model.cpp`, `get_sd_version`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from services.diffusion.core.header import Header, HeaderError

_PREFIXES: Final = ("model.diffusion_model.", "diffusion_model.", "unet.", "")


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture. `encoders`: parts that must be there unless the file holds everything, by the engine's names.

    `size_px`, `steps`, `guidance`: what it was made for. `edits`: it takes reference pictures. `inpaints`: it was made to paint
    under a mask. `distilled`: its guidance is an input of its own, and a negative prompt has no effect at guidance 1.
    """

    name: str
    encoders: tuple[str, ...]
    size_px: int = 1024
    steps: int = 20
    guidance: float = 7.0
    edits: bool = False
    inpaints: bool = False


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Family("sd1", ("clip_l",), size_px=512),
            Family("sd1-inpaint", ("clip_l",), size_px=512, inpaints=True),
            Family("sd2", ("clip_l",), size_px=768),
            Family("sdxl", ("clip_l", "clip_g")),
            Family("sdxl-inpaint", ("clip_l", "clip_g"), inpaints=True),
            Family("sd3", ("clip_l", "clip_g"), guidance=4.5),
            Family("flux", ("clip_l", "t5xxl"), guidance=1.0, edits=True),
            Family("flux-fill", ("clip_l", "t5xxl"), guidance=1.0, inpaints=True),
            Family("flux2", ("llm",), guidance=1.0, edits=True),
            Family("chroma", ("t5xxl",), guidance=4.0),
            Family("qwen-image", ("llm",), guidance=2.5, edits=True),
            Family("z-image", ("llm",), steps=8, guidance=1.0),
            Family("ovis-image", ("llm",), guidance=5.0),
            Family("ernie-image", ("llm",), guidance=4.0),
            Family("anima", ("llm",), guidance=4.0),
        )
    }
)
_VIDEO: Final = ("blocks.0.cross_attn.norm_k.weight", "input_blocks.8.0.time_mixer.mix_factor")
# First match decides; names without the diffusion model's prefix.
_MARKS: Final = (
    ("joint_blocks.", "sd3"),
    ("transformer_blocks.0.img_mod.1.weight", "qwen-image"),
    ("llm_adapter.blocks.0.cross_attn.q_proj.weight", "anima"),
    ("double_stream_modulation_img.lin.weight", "flux2"),
    ("double_blocks.0.img_mlp.gate_proj.weight", "ovis-image"),
    ("cap_embedder.0.weight", "z-image"),
    ("layers.0.adaLN_sa_ln.weight", "ernie-image"),
    ("distilled_guidance_layer.", "chroma"),
)
_TOKENS: Final = "token_embedding.weight"


def family_of(header: Header) -> Family:
    """Return the architecture of a diffusion model or of a checkpoint that has one. Raises HeaderError for anything else."""
    names = tuple(_bare(name) for name in header.tensors)
    if any(name.startswith(mark) for name in names for mark in _VIDEO):
        raise HeaderError("it is a video model; pictures need an image model")
    for mark, family in _MARKS:
        if any(name.startswith(mark) for name in names):
            return FAMILIES[family]
    if any(name.startswith("double_blocks.") for name in names):
        return FAMILIES["flux-fill" if _width(header, "img_in.weight", 1) == 384 else "flux"]
    if any(name.startswith(("input_blocks.", "down_blocks.")) for name in names):
        return _unet(header)
    raise HeaderError(f"it is no image model: {_looks_like(header)}")


def _unet(header: Header) -> Family:
    inpaints = 9 in {_width(header, "input_blocks.0.0.weight", 1), _width(header, "conv_in.weight", 1)}
    if any("label_emb" in name or "add_embedding" in name for name in header.tensors):
        return FAMILIES["sdxl-inpaint" if inpaints else "sdxl"]
    context = _width(header, "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", 1)
    if context == 1024:
        return FAMILIES["sd2"]
    return FAMILIES["sd1-inpaint" if inpaints else "sd1"]


def _bare(name: str) -> str:
    return next(name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix))


def _width(header: Header, name: str, place: int) -> int | None:
    for prefix in _PREFIXES:
        tensor = header.tensors.get(prefix + name)
        if tensor is not None and len(tensor.shape) > place:
            return tensor.shape[place]
    return None


def is_complete(header: Header) -> bool:
    """Return whether a file holds text encoders as well."""
    return any(
        name.startswith(("cond_stage_model.", "conditioner.", "text_encoders.", "te.")) or name.endswith(_TOKENS)
        for name in header.tensors
    )


def upscaler_factor(header: Header) -> int:
    """Return the factor of an ESRGAN network. Raises HeaderError for anything else."""
    names = set(header.tensors)
    if "model.0.weight" in names:  # the names of its first publication
        ups = sum(name.startswith("model.") and name.endswith(".weight") for name in names)
        return 4 if ups >= 5 else 2
    if not {"conv_first.weight", "conv_last.weight"} <= names:
        raise HeaderError(f"it is no ESRGAN upscaler: {_looks_like(header)}")
    return (1, 2, 4)[sum(f"conv_up{place}.weight" in names for place in (1, 2))]


def check_lora(header: Header) -> None:
    """Raise HeaderError for a file that is no LoRA adapter."""
    marks = (
        ".lora_down.",
        ".lora_up.",
        ".lora_A.",
        ".lora_B.",
        ".lora.down.",
        ".lora.up.",
        "lora_unet_",
        ".hada_",
        ".lokr_",
    )
    if not any(mark in name or name.startswith(mark) for name in header.tensors for mark in marks):
        raise HeaderError(f"it is no LoRA adapter: {_looks_like(header)}")


def check_part(header: Header, part: str) -> None:
    """Raise HeaderError when a file cannot be that part of a model. `part`: by the engine's name."""
    wants = _PARTS.get(part)
    if wants is not None and not wants(header.tensors):
        raise HeaderError(f"it is no {part}: {_looks_like(header)}")


def _has(*ends: str) -> Callable[[Iterable[str]], bool]:
    return lambda names: any(end in name for name in names for end in ends)


_PARTS: Final[Mapping[str, Callable[[Iterable[str]], bool]]] = MappingProxyType(
    {
        "vae": _has("decoder.", "post_quant_conv"),
        "taesd": _has("decoder.", "layers."),
        "clip_l": _has("text_model.", "token_embedding", "resblocks"),
        "clip_g": _has("text_model.", "token_embedding", "resblocks"),
        "t5xxl": _has("encoder.block.", "enc.blk.", "shared.weight"),
        "llm": _has("embed_tokens", "token_embd"),
        "control_net": _has("input_hint_block", "zero_convs", "controlnet"),
    }
)


def _looks_like(header: Header) -> str:
    """Return a few words about a file, for a refusal."""
    some = ", ".join(sorted(header.tensors)[:3])
    return f"among its {len(header.tensors)} tensors are {some[:200]}"
