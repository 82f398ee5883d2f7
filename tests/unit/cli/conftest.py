import struct
from collections.abc import Callable

import pytest


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    raise TypeError(value)


@pytest.fixture
def make_gguf() -> Callable[..., bytes]:
    """Builds the bytes of a GGUF file with the given entries and one tensor of `tensor_bytes`."""

    def build(entries: dict[str, object] | None = None, *, tensor_bytes: int = 64, version: int = 3) -> bytes:
        entries = entries or {}
        head = b"GGUF" + struct.pack("<IQQ", version, 2, len(entries))
        head += b"".join(_string(key) + _value(value) for key, value in entries.items())
        head += _string("first") + struct.pack("<IQIQ", 1, tensor_bytes // 4, 0, 0)
        head += _string("second") + struct.pack("<IQIQ", 1, tensor_bytes // 4, 0, tensor_bytes)
        head += bytes(-len(head) % 32)
        return head + bytes(2 * tensor_bytes)

    return build
