"""An ESRGAN network as ncnn stores it, as the tensors that the image engine reads.

ncnn keeps a graph as text, one layer a line, and the layers' weights in a second file in the same order: for each convolution a tag,
its weights (16-bit numbers, filled up to four bytes, or 32-bit ones) and its biases
(https://github.com/Tencent/ncnn/wiki/param-and-model-file-structure). The layers of an RRDBNet always come in the same order.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_HALF: Final = 0x01306B47
_FULL: Final = 0
_OUTPUTS, _KERNEL, _HAS_BIAS, _WEIGHTS = 0, 1, 5, 6
_BEFORE: Final = ("conv_first",)
_AFTER: Final = ("conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last")
_IN_A_BLOCK: Final = tuple(f"rdb{dense}.conv{place}" for dense in (1, 2, 3) for place in (1, 2, 3, 4, 5))


class ConvertError(Exception):
    """The files are not what they should be; the message says how."""


@dataclass(frozen=True, slots=True)
class _Convolution:
    outputs: int
    kernel: int
    weights: int


def tensors(graph: str, weights: bytes) -> dict[str, npt.NDArray[np.generic]]:
    """Return the tensors by the names that the engine knows. Raises ConvertError."""
    convolutions = list(_convolutions(graph))
    found: dict[str, npt.NDArray[np.generic]] = {}
    position = 0
    for name, each in zip(_names(len(convolutions)), convolutions, strict=True):
        values, position = _weights(weights, position, each)
        inputs = each.weights // (each.outputs * each.kernel**2)
        found[f"{name}.weight"] = values.reshape(each.outputs, inputs, each.kernel, each.kernel)
        end = position + 4 * each.outputs
        found[f"{name}.bias"] = np.frombuffer(_part(weights, position, end), "<f4").astype(np.float32)
        position = end
    if position != len(weights):
        raise ConvertError(f"{len(weights) - position} bytes of the weights belong to no layer")
    return found


def _convolutions(graph: str) -> Iterator[_Convolution]:
    for line in graph.splitlines()[2:]:
        fields = line.split()
        if not fields or fields[0] != "Convolution":
            continue
        pairs = dict(field.split("=", 1) for field in fields if "=" in field and not field.startswith("-"))
        numbers = {int(key): int(value) for key, value in pairs.items() if value.isdecimal()}
        if not numbers.get(_HAS_BIAS):
            raise ConvertError("a convolution without biases belongs to another network")
        yield _Convolution(numbers[_OUTPUTS], numbers[_KERNEL], numbers[_WEIGHTS])


def _names(count: int) -> Iterator[str]:
    blocks, rest = divmod(count - len(_BEFORE) - len(_AFTER), len(_IN_A_BLOCK))
    if rest or blocks < 1:
        raise ConvertError(f"{count} convolutions are no RRDBNet that enlarges four times")
    yield from _BEFORE
    yield from (f"body.{block}.{name}" for block in range(blocks) for name in _IN_A_BLOCK)
    yield from _AFTER


def _weights(data: bytes, position: int, each: _Convolution) -> tuple[npt.NDArray[np.float16], int]:
    (tag,) = struct.unpack("<I", _part(data, position, position + 4))
    begin = position + 4
    if tag == _HALF:
        part = _part(data, begin, begin + 2 * each.weights)
        return np.frombuffer(part, "<f2").astype(np.float16), begin + -(-2 * each.weights // 4) * 4
    if tag == _FULL:
        end = begin + 4 * each.weights
        return np.frombuffer(_part(data, begin, end), "<f4").astype(np.float16), end
    raise ConvertError(f"weights of an unknown kind ({tag:#x})")


def _part(data: bytes, begin: int, end: int) -> bytes:
    if end > len(data):
        raise ConvertError("the weights end too early")
    return data[begin:end]
