"""gRPC's messages inside a stream's body: each with a flag and its length before it. Pure."""

import zlib
from typing import Final

import grpc

HEAD: Final = 5
"""Bytes before each message: a flag that says whether it is compressed, and its length."""
ENCODINGS: Final = ("identity", "deflate", "gzip")
_GZIP_OR_ZLIB: Final = 47  # zlib's window bits for "see which of the two it is"


class MessageError(Exception):
    """What came is no message that can be taken; `code` is gRPC's."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def enveloped(message: bytes) -> bytes:
    """Return a serialised message as it stands in a body."""
    return b"\0%b%b" % (len(message).to_bytes(4, "big"), message)


class Assembler:
    """Puts messages together from pieces of a body, cut anywhere; none longer than `most` bytes."""

    __slots__ = ("_has", "_most", "_needs", "_parts")

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[bytes] = []
        self._has = 0
        self._needs = HEAD

    @property
    def is_between(self) -> bool:
        """Whether no message is half there."""
        return not self._has

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the messages that are whole now. Raises MessageError."""
        if not self._has and len(piece) >= HEAD and self._length(piece) == len(piece) - HEAD:
            return [self._opened(piece)]  # the usual case: a piece is a message
        self._parts.append(piece)
        self._has += len(piece)
        if self._has < self._needs:
            return []
        return self._cut(b"".join(self._parts))

    def _cut(self, data: bytes) -> list[bytes]:
        messages: list[bytes] = []
        start, end = 0, len(data)
        self._needs = HEAD
        while end - start >= HEAD:
            stop = start + HEAD + self._length(data[start : start + HEAD])
            if stop > end:
                self._needs = stop - start
                break
            messages.append(self._opened(data[start:stop]))
            start = stop
        self._parts, self._has = ([data[start:]], end - start) if start < end else ([], 0)
        return messages

    def _length(self, head: bytes) -> int:
        length = int.from_bytes(head[1:HEAD], "big")
        if length > self._most:
            raise _too_large(length, self._most)
        return length

    def _opened(self, message: bytes) -> bytes:
        if not message[0]:
            return message[HEAD:]
        if message[0] != 1:
            raise MessageError(grpc.StatusCode.INTERNAL, f"a message with the unknown flag {message[0]}")
        unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            content = unpacker.decompress(message[HEAD:], self._most + 1)
        except zlib.error as error:
            raise MessageError(grpc.StatusCode.INTERNAL, f"a message cannot be decompressed: {error}") from error
        if len(content) > self._most:
            raise _too_large(len(content), self._most)
        if not unpacker.eof:
            raise MessageError(grpc.StatusCode.INTERNAL, "a compressed message ends too soon")
        return content


def _too_large(size: int, most: int) -> MessageError:
    return MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {most})")
