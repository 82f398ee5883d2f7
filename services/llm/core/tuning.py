"""What suits a device: sizes of a step and the number format of the cache, by the generation that its name tells.

Larger steps read a prompt in fewer calls, which pays as far as the device can fill them. A quantised cache halves what a
decoding step reads of it and what it takes; llama.cpp has its kernels for every generation that has flash attention. The
rows are reasoned from that, not measured on each device; whatever is set explicitly wins.
"""

import re
from dataclasses import dataclass
from typing import Final

from services.llm.core.wire import Tuning


@dataclass(frozen=True, slots=True)
class Profile:
    """What is chosen where nothing is set; tokens."""

    name: str
    batch_tokens: int = 2048
    ubatch_tokens: int = 512
    kv_type: str = "f16"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What an engine runs with. `kv_is_chosen`: nobody has set the cache's number format."""

    profile: str
    batch_tokens: int
    ubatch_tokens: int
    kv_type: str
    flash_attention: str
    kv_is_chosen: bool = False


CPU: Final = Profile("cpu")
UNKNOWN: Final = Profile("generic")
"""A device whose generation its name does not tell."""
_BLACKWELL: Final = Profile("blackwell", batch_tokens=4096, ubatch_tokens=2048)
_HOPPER: Final = Profile("hopper", batch_tokens=4096, ubatch_tokens=2048)
_ADA: Final = Profile("ada", ubatch_tokens=1024, kv_type="q8_0")
_AMPERE: Final = Profile("ampere", kv_type="q8_0")
_TURING: Final = Profile("turing", batch_tokens=1024, ubatch_tokens=256)

# NVIDIA's product names; the first that matches counts, so a generation that the name spells out comes first. "RTX 4000" alone
# says nothing: there is one of Turing ("Quadro RTX 4000") and one of Ada ("RTX 4000 Ada Generation").
_NAMES: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), profile)
    for pattern, profile in (
        (r"\bblackwell\b", _BLACKWELL),
        (r"\bada\b", _ADA),
        (r"\b(RTX 50[5-9]0|G?B[123]00|GB10|Thor)\b", _BLACKWELL),
        (r"\b(G?H[128]00|H20)\b", _HOPPER),
        (r"\b(RTX 40[5-9]0|L4|L40S?|L20|L2)\b", _ADA),
        (r"\b(RTX 30[5-9]0|RTX A\d{3,4}|A100|A800|A10G?|A16|A2|A30|A40|Orin)\b", _AMPERE),
        (r"\b(Quadro RTX|TITAN RTX|RTX 20[5-8]0|GTX 16[356]0|T4G?|T400|T550|T600|T1000|T1200)\b", _TURING),
    )
)


def profile_of(device: str) -> Profile:
    """Return what suits a device, by its name as its driver tells it; `cpu` is none."""
    if device == "cpu":
        return CPU
    return next((profile for pattern, profile in _NAMES if pattern.search(device)), UNKNOWN)


def tune(asked: Tuning, device: str) -> Tuned:
    """Return what to run with on a device: what was asked for, else what suits it. A quantised cache needs flash attention."""
    profile = profile_of(device)
    kv_type = asked.kv_type or profile.kv_type
    batch_tokens = asked.batch_tokens or profile.batch_tokens
    return Tuned(
        profile=profile.name,
        batch_tokens=batch_tokens,
        ubatch_tokens=min(asked.ubatch_tokens or profile.ubatch_tokens, batch_tokens),
        kv_type=kv_type,
        flash_attention=_flash_attention(asked.flash_attention, kv_type),
        kv_is_chosen=not asked.kv_type,
    )


def plainer(tuned: Tuned, asked: Tuning) -> Tuned | None:
    """Return what to try when no context can be made: a cache as precise as models expect, unless its format was set."""
    if not tuned.kv_is_chosen or not is_quantised(tuned.kv_type):
        return None
    return Tuned(
        profile=tuned.profile,
        batch_tokens=tuned.batch_tokens,
        ubatch_tokens=tuned.ubatch_tokens,
        kv_type=CPU.kv_type,
        flash_attention=_flash_attention(asked.flash_attention, CPU.kv_type),
    )


def is_quantised(kv_type: str) -> bool:
    """Return whether numbers of that type come in blocks with a scale."""
    return kv_type not in {"f32", "f16", "bf16"}


def largest_kv_type(asked: Tuning) -> str:
    """Return the type that a cache takes most memory with, before it is known on which device it will be."""
    return asked.kv_type or CPU.kv_type


def largest_ubatch_tokens(asked: Tuning, *, on_host: bool) -> int:
    """Return the most tokens that are computed at once, before it is known on which device."""
    if asked.ubatch_tokens is not None:
        return asked.ubatch_tokens
    profiles = (CPU,) if on_host else (CPU, UNKNOWN, *(profile for _, profile in _NAMES))
    return max(profile.ubatch_tokens for profile in profiles)


def _flash_attention(asked: str, kv_type: str) -> str:
    return "on" if is_quantised(kv_type) else asked
