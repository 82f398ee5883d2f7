"""How much memory a model will take, from what its file says about itself."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from services.llm.core.gguf import Header

MIB: Final = 1024 * 1024
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
