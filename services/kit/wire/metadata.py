"""What gRPC says in headers: metadata, deadlines, statuses. Pure.

Source: gRPC over HTTP/2 (PROTOCOL-HTTP2.md of gRPC's documentation).
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import quote, unquote

import grpc

from services.kit.wire.frames import literal

Pairs = tuple[tuple[str, str | bytes], ...]

_BINARY: Final = "-bin"
_OF_THE_CALL: Final = frozenset({"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"})
_OF_THE_STATUS: Final = frozenset({"grpc-status", "grpc-message"})
_CODES: Final = {str(code.value[0]): code for code in grpc.StatusCode}
_TIMEOUT: Final = re.compile(r"(\d{1,8})([HMSmun])")
_UNIT_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_AS_IT_IS: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_KEY: Final = re.compile(r"[0-9a-z_.-]{1,126}")


def metadata_of(headers: Mapping[str, str]) -> Pairs:
    """Return what the caller says beside the call itself. Raises ValueError when a binary value is not base64."""
    return tuple(
        (name, _binary(value) if name.endswith(_BINARY) else value)
        for name, value in headers.items()
        if name[0] != ":" and name not in _OF_THE_CALL
    )


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the caller waits, or None for ever. Raises ValueError for what is no timeout."""
    text = headers.get("grpc-timeout")
    if text is None:
        return None
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise ValueError(f"grpc-timeout {text[:20]!r} is no timeout")
    return int(found[1]) * _UNIT_S[found[2]]


def block_of(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return metadata as headers. Raises ValueError for a key that gRPC does not know how to carry."""
    return b"".join(literal(_key(key), _value(key, value)) for key, value in metadata)


def status_block(code: grpc.StatusCode, text: str, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return the headers that end a call."""
    number: int = code.value[0]
    block = literal(b"grpc-status", str(number).encode())
    if text:
        block += literal(b"grpc-message", quote(text, safe=_AS_IT_IS).encode("ascii"))
    return block + block_of(metadata)


def status_of(headers: Mapping[str, str]) -> tuple[grpc.StatusCode, str, Pairs]:
    """Return code, text and metadata of the headers that end a call; a peer that says no code has failed."""
    code = _CODES.get(headers.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
    text = unquote(headers.get("grpc-message", ""))
    if "grpc-status" not in headers:
        code, text = grpc.StatusCode.UNAVAILABLE, f"the peer answered HTTP status {headers.get(':status', 'none')}"
    metadata = metadata_of({name: value for name, value in headers.items() if name not in _OF_THE_STATUS})
    return code, text, metadata


def _binary(value: str) -> bytes:
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"metadata that is no base64: {error}") from error


def _key(key: str) -> bytes:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key[:40]!r} is no key of metadata")
    return key.encode("ascii")


def _value(key: str, value: str | bytes) -> bytes:
    if key.endswith(_BINARY):
        return base64.b64encode(value if isinstance(value, bytes) else value.encode()).rstrip(b"=")
    return value if isinstance(value, bytes) else value.encode("ascii", "replace")
