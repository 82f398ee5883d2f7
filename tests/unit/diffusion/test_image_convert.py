"""Upscalers in ncnn's files become the tensors that the image engine reads."""

import struct

import numpy as np
import pytest

from services.diffusion.convert.ncnn import ConvertError, tensors
from services.diffusion.core.family import upscaler_factor
from services.diffusion.core.header import Header, Tensor

_CONVOLUTIONS = 1 + 15 + 5


def layer(number: int, outputs: int = 2, inputs: int = 2) -> str:
    return f"Convolution Conv_{number} 1 1 a b 0={outputs} 1=3 4=1 5=1 6={outputs * inputs * 9} 9=2 -23310=1,2.0e-01"


def files(count: int = _CONVOLUTIONS, *, half: bool = True) -> tuple[str, bytes]:
    lines = ["7767517", "9 9", "Input input 0 1 data"]
    data = b""
    for number in range(count):
        lines += [layer(number), "BinaryOp Add 2 1 a b c"]
        values = np.arange(36, dtype=np.float32) + number
        data += struct.pack("<I", 0x01306B47) + values.astype("<f2").tobytes() if half else struct.pack("<I", 0)
        data += b"" if half else values.tobytes()
        data += np.full(2, number, "<f4").tobytes()
    return "\n".join(lines), data


@pytest.mark.parametrize("half", [True, False])
def test_layers_get_their_names_in_the_order_of_the_network(half):
    found = tensors(*files(half=half))
    assert len(found) == 2 * _CONVOLUTIONS
    assert found["conv_first.weight"].shape == (2, 2, 3, 3)
    assert found["body.0.rdb1.conv1.bias"].tolist() == [1, 1]
    assert found["conv_last.weight"].ravel()[0] == _CONVOLUTIONS - 1
    header = Header({name: Tensor(name, values.shape) for name, values in found.items()}, {})
    assert upscaler_factor(header) == 4


def test_another_network_or_a_cut_file_is_refused():
    graph, weights = files()
    with pytest.raises(ConvertError, match="no RRDBNet"):
        tensors(*files(_CONVOLUTIONS + 1))
    with pytest.raises(ConvertError, match="end too early"):
        tensors(graph, weights[:-1])
    with pytest.raises(ConvertError, match="belong to no layer"):
        tensors(graph, weights + b"more")
    with pytest.raises(ConvertError, match="unknown kind"):
        tensors(graph, b"\1\2\3\4" + weights[4:])
    with pytest.raises(ConvertError, match="without biases"):
        tensors(graph.replace(" 5=1", " 5=0", 1), weights)
