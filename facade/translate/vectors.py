"""The numbers of the contract's vectors, without a Python object for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from omniserve.llm.v1 import llm_pb2


def raw_floats(vector: llm_pb2.Vector) -> bytes:
    """Return the numbers as little-endian 32-bit floats.

    That is how protobuf writes them: after the field's tag and length, one behind the other.
    """
    data = vector.SerializeToString()
    at = 1
    while at < len(data) and data[at] & 0x80:
        at += 1
    return data[at + 1 :]


def numbers(vector: llm_pb2.Vector) -> npt.NDArray[np.float32]:
    """Return the numbers as an array."""
    import numpy as np  # noqa: PLC0415 - a fifth of what a start imports, and only this needs it

    return np.frombuffer(raw_floats(vector), "<f4")
