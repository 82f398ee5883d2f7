"""How messages travel: MessagePack behind a length, over a byte stream."""

import struct
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
_LENGTH: Final = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


class WireError(Exception):
    """The peer sent what is no message of the protocol."""


def encode(message: msgspec.Struct) -> bytes:
    """Return a message with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[M]):
    """Takes bytes as they arrive and gives whole messages of one type."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401 - a union of message types
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that are whole now. Raises WireError on anything else."""
        self._bytes += data
        at = 0
        try:
            while len(self._bytes) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._bytes, at)
                if length > MAX_MESSAGE_BYTES:
                    raise WireError(f"a message of {length} bytes; the most is {MAX_MESSAGE_BYTES}")
                end = at + _LENGTH.size + length
                if end > len(self._bytes):
                    break
                body = bytes(memoryview(self._bytes)[at + _LENGTH.size : end])
                at = end
                yield self._decode(body)
        finally:
            del self._bytes[:at]

    def _decode(self, body: bytes) -> M:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"no message of the protocol: {error}") from error
