"""What a model file says about itself before it is loaded: its tensors, and whether all of their bytes are there.

The engine ends its process on many a damaged file, so a file is read here first. Formats: safetensors (a JSON index behind
its length) and GGUF version 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

MOST_INDEX_BYTES: Final = 128 * 1024 * 1024
_MOST_TENSORS: Final = 200_000
_MOST_DIMENSIONS: Final = 8
_LONGEST_TEXT: Final = 1000
_GGUF: Final = b"GGUF"
_TYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "F64": 8,
        "I64": 8,
        "F32": 4,
        "I32": 4,
        "F16": 2,
        "BF16": 2,
        "I16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
    }
)
# ggml's types: numbers in a block, bytes of a block.
_BLOCKS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {
        0: (1, 4),
        1: (1, 2),
        2: (32, 18),
        3: (32, 20),
        6: (32, 22),
        7: (32, 24),
        8: (32, 34),
        9: (32, 36),
        10: (256, 84),
        11: (256, 110),
        12: (256, 144),
        13: (256, 176),
        14: (256, 210),
        15: (256, 292),
        16: (256, 66),
        17: (256, 74),
        18: (256, 98),
        19: (256, 50),
        20: (32, 18),
        21: (256, 110),
        22: (256, 82),
        23: (256, 136),
        24: (1, 1),
        25: (1, 2),
        26: (1, 4),
        27: (1, 8),
        28: (1, 8),
        29: (256, 56),
        30: (1, 2),
        34: (256, 54),
        35: (256, 66),
        39: (32, 17),
        40: (64, 36),
    }
)
# GGUF's value types: struct formats of the fixed ones; 8 is a string, 9 an array.
_SCALARS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING: Final = 8
_ARRAY: Final = 9


class HeaderError(Exception):
    """The file is no model file, or damaged; the message says how."""


class Source(Protocol):
    """A file that is read from its beginning."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes, fewer at the end."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. `shape`: the outermost dimension first, as PyTorch has it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """A file's tensors by name, and the metadata that is text."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_header(source: Source, size: int) -> Header:
    """Return the header of a file of so many bytes. Raises HeaderError."""
    start = _exactly(source, 8)
    if start[:4] == _GGUF:
        return _gguf(_Reader(source, start[4:]), size)
    return _safetensors(source, struct.unpack("<Q", start)[0], size)


def _exactly(source: Source, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise HeaderError("it ends within its header: it is truncated, or no model file")
    return data


# ---- safetensors ---------------------------------------------------------------------------------------------


def _safetensors(source: Source, length: int, size: int) -> Header:
    if not 2 <= length <= min(size, MOST_INDEX_BYTES):
        raise HeaderError("it is neither a safetensors nor a GGUF file")
    try:
        index = json.loads(_exactly(source, length))
    except ValueError as error:
        raise HeaderError(f"its index is no JSON: {error}") from error
    if not isinstance(index, dict) or len(index) > _MOST_TENSORS:
        raise HeaderError("its index is not one of a safetensors file")
    said = index.pop("__metadata__", {})
    room = size - 8 - length
    tensors = {name: _listed(name, entry, room) for name, entry in index.items()}
    if not tensors:
        raise HeaderError("it has no tensors")
    metadata = said if isinstance(said, dict) else {}
    return Header(tensors, {str(key): str(value) for key, value in metadata.items()})


def _listed(name: str, entry: Any, room: int) -> Tensor:  # noqa: ANN401 - parsed JSON
    try:
        shape = tuple(_number(each) for each in entry["shape"])
        begin, end = (_number(each) for each in entry["data_offsets"])
        width = _TYPE_BYTES[entry["dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise HeaderError(f"its tensor {name[:100]!r} is not described as it must be") from error
    if len(shape) > _MOST_DIMENSIONS or end - begin != math.prod(shape) * width:
        raise HeaderError(f"its tensor {name[:100]!r} is not as large as its shape says")
    if end > room:
        raise HeaderError(f"it is truncated: {end - room} bytes are missing at least")
    return Tensor(name, shape)


def _number(value: Any) -> int:  # noqa: ANN401 - parsed JSON
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ValueError(value)
    return value


# ---- GGUF ----------------------------------------------------------------------------------------------------


class _Reader:
    """Reads values and counts their bytes."""

    def __init__(self, source: Source, begun: bytes) -> None:
        self._source = source
        self._ahead = begun
        self.position = 4

    def take(self, size: int) -> bytes:
        if self.position + size > MOST_INDEX_BYTES:
            raise HeaderError(f"its header is longer than {MOST_INDEX_BYTES} bytes")
        ahead, self._ahead = self._ahead[:size], self._ahead[size:]
        self.position += size
        return ahead + _exactly(self._source, size - len(ahead))

    def value(self, form: str) -> Any:  # noqa: ANN401 - by the format
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self) -> int:
        return int(self.value("Q"))

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8", "replace")

    def skip(self, kind: int) -> str | None:
        """Pass a value by; return it when it is text."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = int(self.value("I")), self.count()
            if inner in _SCALARS:
                self.take(struct.calcsize(_SCALARS[inner]) * count)
            elif inner == _STRING:
                for _ in range(count):
                    self.take(self.count())
            else:
                raise HeaderError("its metadata holds an array of an unknown type")
            return None
        if kind not in _SCALARS:
            raise HeaderError(f"its metadata holds a value of unknown type {kind}")
        self.take(struct.calcsize(_SCALARS[kind]))
        return None


def _gguf(reader: _Reader, size: int) -> Header:
    version = reader.value("I")
    if version not in {2, 3}:
        raise HeaderError(f"it is a GGUF file of version {version}; 2 and 3 are known")
    count, pairs = reader.count(), reader.count()
    if not 0 < count <= _MOST_TENSORS or pairs > _MOST_TENSORS:
        raise HeaderError("its header is damaged, or it has no tensors")
    metadata, alignment = _metadata(reader, pairs)
    tensors: dict[str, Tensor] = {}
    end = 0
    for _ in range(count):
        tensor, tensor_end = _described(reader)
        tensors[tensor.name] = tensor
        end = max(end, tensor_end)
    begin = -(-reader.position // alignment) * alignment
    if begin + end > size:
        raise HeaderError(f"it is truncated: {begin + end - size} bytes are missing at least")
    return Header(tensors, metadata)


def _metadata(reader: _Reader, pairs: int) -> tuple[dict[str, str], int]:
    """Return what is text, and how tensors are aligned."""
    metadata: dict[str, str] = {}
    alignment = 32
    for _ in range(pairs):
        key, kind = reader.text(), int(reader.value("I"))
        if key == "general.alignment" and kind == 4:
            alignment = max(1, int(reader.value("I")))
            continue
        found = reader.skip(kind)
        if found is not None and len(found) <= _LONGEST_TEXT:
            metadata[key] = found
    return metadata, alignment


def _described(reader: _Reader) -> tuple[Tensor, int]:
    """Return a tensor, and where it ends behind the header."""
    name, dimensions = reader.text(), int(reader.value("I"))
    if dimensions > _MOST_DIMENSIONS:
        raise HeaderError(f"its tensor {name[:100]!r} has {dimensions} dimensions")
    sizes = [reader.count() for _ in range(dimensions)]
    kind, offset = int(reader.value("I")), reader.count()
    if kind not in _BLOCKS:
        raise HeaderError(f"its tensor {name[:100]!r} is of unknown type {kind}")
    numbers, width = _BLOCKS[kind]
    if sizes and sizes[0] % numbers:
        raise HeaderError(f"its tensor {name[:100]!r} does not fill the blocks of its type")
    return Tensor(name, tuple(reversed(sizes))), offset + math.prod(sizes) // numbers * width
