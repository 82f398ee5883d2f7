"""How much memory a model will take, from what its file says about itself."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from services.llm.core.gguf import Header

MIB: Final = 1024 * 1024
_STATES: Final = 8
"""Hidden states of a token that are there at once while a step is computed."""
# Bits per number of the KV cache, block scales included (ggml's block layouts: 32 numbers each).
_KV_BITS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "f32": 32,
        "f16": 16,
        "bf16": 16,
        "q8_0": 8.5,
        "q5_1": 6,
        "q5_0": 5.5,
        "q4_1": 5,
        "q4_0": 4.5,
        "iq4_nl": 4.5,
    }
)


def kv_bytes(header: Header, *, cells: int, kv_type: str) -> int:
    """Return the size of a KV cache of so many cells."""
    return int(header.kv_values_per_token * cells * _KV_BITS[kv_type] / 8)


def need_mib(header: Header, *, file_bytes: int, cells: int, kv_type: str) -> int:
    """Return what a model takes, MiB rounded up: its weights as large as the file, and its KV cache."""
    return -(-(file_bytes + kv_bytes(header, cells=cells, kv_type=kv_type)) // MIB)


def scratch_mib(header: Header, *, step_tokens: int, has_logits: bool) -> int:
    """Return what computing a step takes beside weights and cache, MiB rounded up.

    That is the step's logits, if it has any, and a handful of hidden states for each of its tokens, in 32 bits: llama.cpp
    reserves as much before the first step.
    """
    values = has_logits * header.vocabulary_tokens + _STATES * header.embedding_width
    return -(-step_tokens * values * 4 // MIB)


def lease_mib(*, kept_mib: int, scratch_mib: int, share: float, seen_mib: int | None) -> int:
    """Return how much memory to lease for a model.

    `kept_mib`: its weights and cache, of which the part `share` is on the device; `seen_mib`: the most that it was seen to
    take, which knows better than any estimate what is taken beyond those.
    """
    kept = math.ceil(kept_mib * share)
    return kept + scratch_mib if seen_mib is None else max(kept, seen_mib)
