"""Reads the header of a GGUF file: enough to name a model and to tell a whole file from a cut or foreign one."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# More than any real header holds; a number above it means that the bytes are not what they seem.
_MOST_ITEMS = 1_000_000

# struct codes by GGUF value type; 8 is a string, 9 an array.
_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

# Names of llama.cpp's `general.file_type`.
_FILE_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip


class GgufError(ValueError):
    """The file is no GGUF file, or not a whole one; the message says which and why."""


@dataclass(frozen=True)
class GgufHeader:
    """What the header says. Absent entries are None."""

    architecture: str | None
    name: str | None
    quantisation: str | None
    context_tokens: int | None
    tensor_count: int
    size_bytes: int


def read_header(path: Path) -> GgufHeader:
    """Read the header of the file at `path`.

    Raises GgufError for a foreign, cut or corrupt file, OSError when it cannot be read at all.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(file, size)
        try:
            return _header(reader, size)
        except (struct.error, UnicodeDecodeError) as error:
            raise GgufError(f"corrupt header near byte {file.tell()}: {error}") from error


def _header(reader: _Reader, size: int) -> GgufHeader:
    magic = reader.take(len(MAGIC), "magic")
    if magic != MAGIC:
        raise GgufError(describe_foreign(magic))
    version = reader.number("I", "version")
    if version not in _VERSIONS:
        raise GgufError(f"GGUF version {version} is not supported (only {_VERSIONS[0]} and {_VERSIONS[1]})")
    tensors = reader.count("tensor count")
    entries = reader.count("entry count")
    meta = {reader.string("key"): reader.value() for _ in range(entries)}
    _check_whole(reader, tensors, meta.get("general.alignment"), size)
    architecture = _text(meta.get("general.architecture"))
    return GgufHeader(
        architecture=architecture,
        name=_text(meta.get("general.name")),
        quantisation=_quantisation(meta.get("general.file_type")),
        context_tokens=_whole(meta.get(f"{architecture}.context_length")),
        tensor_count=tensors,
        size_bytes=size,
    )


def _check_whole(reader: _Reader, tensors: int, alignment: object, size: int) -> None:
    """Refuse a file that ends before its last tensor begins: an interrupted copy looks like that."""
    furthest = 0
    for _ in range(tensors):
        reader.string("tensor name")
        dimensions = reader.number("I", "dimensions")
        reader.take(8 * dimensions + 4, "tensor shape and type")
        furthest = max(furthest, reader.number("Q", "tensor offset"))
    step = _whole(alignment) or _DEFAULT_ALIGNMENT
    start = -(-reader.position() // step) * step
    if tensors and size <= start + furthest:
        raise GgufError(f"cut short: {size} bytes, but a tensor begins at byte {start + furthest}")


def describe_foreign(first: bytes) -> str:
    """Say what a file that is not GGUF seems to be, by its first bytes."""
    if not first:
        return "empty file"
    if first.lstrip().startswith((b"<", b"<!")):
        return "not a GGUF file but a web page (the address leads to a page, not to the file)"
    if first.startswith(b"vers"):
        return "not the model but a Git LFS pointer to it"
    return f"not a GGUF file: it begins with {first[:4]!r} instead of {MAGIC!r}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _quantisation(file_type: object) -> str | None:
    number = _whole(file_type)
    return None if number is None else _FILE_TYPES.get(number, f"type {number}")


class _Reader:
    """Takes little-endian pieces from a file and refuses to believe lengths that the file cannot hold."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def position(self) -> int:
        return self._file.tell()

    def take(self, length: int, what: str) -> bytes:
        data = self._file.read(length) if length <= self._size else b""
        if len(data) < length:
            raise GgufError(
                "empty file" if self._size == 0 else f"cut short within the header ({what}): {self._size} bytes in all"
            )
        return data

    def number(self, code: str, what: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))
        return int(value)

    def count(self, what: str) -> int:
        value = self.number("Q", what)
        if value > _MOST_ITEMS:
            raise GgufError(f"corrupt header: {what} {value}")
        return value

    def string(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode("utf-8")

    def value(self) -> object:
        kind = self.number("I", "value type")
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind == _STRING:
            return self.string("value")
        code = _SCALARS.get(kind)
        if code is None:
            raise GgufError(f"corrupt header: value type {kind}")
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), "value"))
        return value

    def _skip_array(self) -> None:
        kind = self.number("I", "array type")
        length = self.number("Q", "array length")
        if kind == _STRING:
            for _ in range(length):
                self.take(self.number("Q", "array string length"), "array string")
            return
        code = _SCALARS.get(kind)
        if code is None:
            raise GgufError(f"corrupt header: array of type {kind}")
        self.take(struct.calcsize("<" + code) * length, "array")
