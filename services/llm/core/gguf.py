"""GGUF headers: what a model file says about itself, and whether it is whole; checked before llama.cpp sees the file."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
_MOST_ENTRIES: Final = 1_000_000
_MOST_DIMENSIONS: Final = 4
_MOST_KEPT: Final = 4096
"""Longest array of numbers whose values are kept: one for each layer, not one for each token."""
_RANK_POOLING: Final = 4
_ENCODERS: Final = ("bert", "t5encoder", "gemma-embedding")
"""Parts of the names of architectures that only make vectors."""
_POOLINGS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "none", 1: "mean", 2: "cls", 3: "last", _RANK_POOLING: "rank"}
)
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[Mapping[int, struct.Struct]] = MappingProxyType(
    {
        0: struct.Struct("<B"),
        1: struct.Struct("<b"),
        2: struct.Struct("<H"),
        3: struct.Struct("<h"),
        4: struct.Struct("<I"),
        5: struct.Struct("<i"),
        6: struct.Struct("<f"),
        7: struct.Struct("<?"),
        10: struct.Struct("<Q"),
        11: struct.Struct("<q"),
        12: struct.Struct("<d"),
    }
)
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

# Elements and bytes of a block, by ggml's number of the type.
_BLOCKS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {
        0: (1, 4),
        1: (1, 2),
        2: (32, 18),
        3: (32, 20),
        6: (32, 22),
        7: (32, 24),
        8: (32, 34),
        10: (256, 84),
        11: (256, 110),
        12: (256, 144),
        13: (256, 176),
        14: (256, 210),
        24: (1, 1),
        25: (1, 2),
        26: (1, 4),
        30: (1, 2),
    }
)
_QUANTISATIONS: Final[Mapping[int, str]] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        7: "Q8_0",
        8: "Q5_0",
        9: "Q5_1",
        10: "Q2_K",
        11: "Q3_K_S",
        12: "Q3_K_M",
        13: "Q3_K_L",
        14: "Q4_K_S",
        15: "Q4_K_M",
        16: "Q5_K_S",
        17: "Q5_K_M",
        18: "Q6_K",
        19: "IQ2_XXS",
        20: "IQ2_XS",
        23: "IQ3_XXS",
        24: "IQ1_S",
        25: "IQ4_NL",
        26: "IQ3_S",
        27: "IQ3_M",
        28: "IQ2_S",
        29: "IQ2_M",
        30: "IQ4_XS",
        31: "IQ1_M",
        32: "BF16",
        36: "TQ1_0",
        37: "TQ2_0",
        38: "MXFP4_MOE",
        39: "NVFP4",
    }
)


class GgufError(Exception):
    """The file is no GGUF that can be loaded; the message says where it goes wrong."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a model file says about itself.

    `metadata`: scalars, strings and short arrays of numbers; of every other array only its length.
    """

    version: int
    metadata: Mapping[str, Any]
    tensors: int
    parameters: int

    def _number(self, key: str) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", 0)
        return value if isinstance(value, int) else 0

    def _by_layer(self, key: str) -> tuple[int, ...]:
        """Return a number for each layer, whether the file has one for all or one for each."""
        value = self.metadata.get(f"{self.architecture}.{key}", 0)
        if isinstance(value, tuple):
            return tuple(int(each) for each in value[: self.layers])
        return (value if isinstance(value, int) else 0,) * self.layers

    @property
    def architecture(self) -> str:
        """E.g. llama; empty when the file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def context_tokens(self) -> int:
        """The context the model was trained for; 0 when the file does not say."""
        return self._number("context_length")

    @property
    def layers(self) -> int:
        """Layers; 0 when the file does not say."""
        return self._number("block_count")

    @property
    def embedding_width(self) -> int:
        """Width of its hidden states, and of the vectors it makes; 0 when the file does not say."""
        return self._number("embedding_length")

    @property
    def vocabulary_tokens(self) -> int:
        """How many tokens there are; 0 when the file does not say."""
        count = self.metadata.get("tokenizer.ggml.tokens", 0)
        return count if isinstance(count, int) else len(count)

    @property
    def pooling(self) -> str:
        """How vectors of tokens become one: none, mean, cls, last or rank; empty when the file does not say."""
        value = self.metadata.get(f"{self.architecture}.pooling_type")
        return _POOLINGS.get(value, "") if isinstance(value, int) else ""

    @property
    def kind(self) -> str:
        """What the model does: chat, embedding or rerank.

        A file that says how to pool makes vectors, also when its architecture could generate (Qwen3-Embedding); pooling by
        rank scores pairs.
        """
        if self.pooling == "rank":
            return "rerank"
        is_encoder = any(part in self.architecture for part in _ENCODERS)
        makes_vectors = is_encoder or self.pooling not in {"", "none"}
        return "embedding" if makes_vectors else "chat"

    @property
    def is_lora(self) -> bool:
        """Whether it is an adapter for a model, not a model."""
        return self.metadata.get("general.type") == "adapter" and self.metadata.get("adapter.type") == "lora"

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache keeps for a token: keys and values of every layer that attends.

        Where the file does not say how wide keys and values are, they are a head's share of the hidden state, as llama.cpp
        has it; models that keep a compressed cache (MLA) need less, and sliding windows do.
        """
        heads = self._by_layer("attention.head_count")
        key_heads = self._by_layer("attention.head_count_kv")
        if not any(key_heads) and f"{self.architecture}.attention.head_count_kv" not in self.metadata:
            key_heads = heads
        widest = max(heads, default=0)
        share = self.embedding_width // widest if widest else 0
        width = (self._number("attention.key_length") or share) + (self._number("attention.value_length") or share)
        return sum(key_heads) * width

    @property
    def quantisation(self) -> str:
        """E.g. Q4_1; empty when the file does not say."""
        return _QUANTISATIONS.get(self.metadata.get("general.file_type", -1), "")

    @property
    def template(self) -> str:
        """The chat template; empty when there is none."""
        return str(self.metadata.get("tokenizer.chat_template", ""))


class _Reader:
    """Walks through the bytes and never beyond their end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def _need(self, size: int, what: str) -> int:
        at = self.at
        if size > len(self._data) - at:
            raise GgufError(f"truncated: {what} at byte {at} needs {size} bytes, the file ends at {len(self._data)}")
        self.at = at + size
        return at

    def number(self, form: struct.Struct, what: str) -> Any:  # noqa: ANN401 - an int, float or bool
        at = self._need(form.size, what)
        return form.unpack_from(self._data, at)[0]

    def text(self, what: str) -> str:
        length = self.number(_U64, what)
        at = self._need(length, what)
        return bytes(self._data[at : at + length]).decode("utf-8", "replace")

    def skip(self, size: int, what: str) -> None:
        self._need(size, what)

    def skip_texts(self, count: int, what: str) -> None:
        unpack, data, end = _U64.unpack_from, self._data, len(self._data)
        at = self.at
        for _ in range(count):
            if at + 8 > end:
                raise GgufError(f"truncated: {what} goes beyond the end of the file at {end}")
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise GgufError(f"truncated: {what} goes beyond the end of the file at {end}")
        self.at = at


def read_header(data: memoryview) -> Header:
    """Read the header of a whole file. Raises GgufError: no GGUF, an unknown version, or not all of it is there."""
    if bytes(data[:4]) != MAGIC:
        raise GgufError(f"no GGUF file: it begins with {bytes(data[:4])!r}, not {MAGIC!r}")
    reader = _Reader(data)
    reader.skip(4, "the magic")
    version = reader.number(_U32, "the version")
    if version not in VERSIONS:
        raise GgufError(f"GGUF version {version}; versions {', '.join(map(str, VERSIONS))} can be read")
    tensors = _count(reader, "tensors")
    entries = _count(reader, "metadata entries")
    metadata = {}
    for _ in range(entries):
        key = reader.text("a metadata key")
        metadata[key] = _value(reader, reader.number(_U32, key), key)
    parameters, needed = _tensors(reader, tensors)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise GgufError(f"general.alignment is {alignment!r}")
    end = reader.at + -reader.at % alignment + needed
    if end > len(data):
        raise GgufError(f"truncated: the weights end at byte {end}, the file at {len(data)}")
    return Header(version, MappingProxyType(metadata), tensors, parameters)


def _count(reader: _Reader, what: str) -> int:
    count = int(reader.number(_U64, f"the number of {what}"))
    if count > _MOST_ENTRIES:
        raise GgufError(f"damaged: it claims {count} {what}; the most is {_MOST_ENTRIES}")
    return count


def _value(reader: _Reader, kind: int, key: str) -> Any:  # noqa: ANN401 - whatever the file holds
    if kind == _STRING:
        return reader.text(key)
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind], key)
    if kind != _ARRAY:
        raise GgufError(f"damaged: {key} has the unknown type {kind}")
    inner = reader.number(_U32, key)
    count = reader.number(_U64, key)
    if inner == _STRING:
        reader.skip_texts(count, key)
    elif inner in _SCALARS and count <= _MOST_KEPT:
        return tuple(reader.number(_SCALARS[inner], key) for _ in range(count))
    elif inner in _SCALARS:
        reader.skip(_SCALARS[inner].size * count, key)
    else:
        raise GgufError(f"damaged: {key} is an array of the unknown type {inner}")
    return count


def _tensors(reader: _Reader, count: int) -> tuple[int, int]:
    """Return the number of parameters, and where the last tensor ends, bytes from the first."""
    parameters = needed = 0
    for _ in range(count):
        name = reader.text("a tensor's name")
        dimensions = reader.number(_U32, name)
        if dimensions > _MOST_DIMENSIONS:
            raise GgufError(f"damaged: tensor {name[:64]!r} has {dimensions} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= reader.number(_U64, name)
        kind = reader.number(_U32, name)
        offset = reader.number(_U64, name)
        parameters += elements
        block, size = _BLOCKS.get(kind, (1, 0))
        needed = max(needed, offset + elements // block * size)
    return parameters, needed
