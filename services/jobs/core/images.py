"""Kept pictures: what may be kept, for how long, and who may see one by its signed URL."""

import hashlib
import hmac
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlencode

from services.kit.errors import DomainError, Reason

MEDIA_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
)
PATH: Final = "/v1/images/files/"
"""Where callers find pictures, below the public base."""
_LONGEST_ID: Final = 64
# Callers without a key, as the listeners call them: to them the signature alone is enough.
_WITHOUT_KEY: Final = frozenset({"anonymous", "operator"})


@dataclass(frozen=True, slots=True)
class ImageBounds:
    """`ttl_ms`: longest and default life of a URL. `image_bytes`: largest picture. `total_bytes`: all files together."""

    ttl_ms: int
    image_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """A kept picture. `digest`: SHA-256 of its file, hexadecimal. Times are milliseconds since 1970."""

    image_id: str
    principal: str
    digest: str
    media_type: str
    size_bytes: int
    created_ms: int
    expires_ms: int


def check_ttl(ttl_s: int | None, bounds: ImageBounds) -> int:
    """Return how long a URL is good, ms; DomainError invalid_request for no time at all."""
    if ttl_s == 0:
        raise DomainError(Reason.INVALID_REQUEST, "'head.ttl_s' is 0; at least 1 s is needed", field="head.ttl_s")
    return bounds.ttl_ms if ttl_s is None else min(ttl_s * 1000, bounds.ttl_ms)


def check_size(size: int, bounds: ImageBounds) -> None:
    """Raise DomainError too_large for a picture that may not be kept."""
    if size > bounds.image_bytes:
        message = f"the picture has {size} bytes or more; at most {bounds.image_bytes} are kept"
        raise DomainError(Reason.TOO_LARGE, message, field="data")


def sign(key: bytes, image_id: str, expires_ms: int) -> str:
    """Return the signature of a URL: HMAC-SHA256 (RFC 2104) over id and end, base64url without padding."""
    said = f"{image_id}\n{expires_ms}".encode()
    return urlsafe_b64encode(hmac.digest(key, said, hashlib.sha256)).rstrip(b"=").decode()


def signed_url(base: str, key: bytes, image_id: str, expires_ms: int) -> str:
    """Return where a picture is found below a base until it expires."""
    query = urlencode({"expires": expires_ms, "signature": sign(key, image_id, expires_ms)})
    return f"{base.rstrip('/')}{PATH}{image_id}?{query}"


def check_signed(key: bytes, image_id: str, expires_ms: int, signature: str, *, now_ms: int) -> None:
    """Raise DomainError not_found unless the signature is right and the URL not over."""
    is_right = hmac.compare_digest(sign(key, image_id, expires_ms).encode(), signature.encode())
    if not is_right or expires_ms <= now_ms:
        raise unknown_image(image_id)


def check_seer(image: Image, client: str) -> None:
    """Raise DomainError not_found when somebody else's key asks for a picture."""
    if client != image.principal and client not in _WITHOUT_KEY:
        raise unknown_image(image.image_id)


def unknown_image(image_id: str) -> DomainError:
    """Return the refusal of a picture that is not there, is over, or is not for this caller: nobody can tell which."""
    return DomainError(Reason.NOT_FOUND, f"there is no picture {image_id[:_LONGEST_ID]!r}", field="image_id")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file, bytes."""

    first: int
    length: int


def span(size: int, first: int, last: int | None) -> Span | None:
    """Return which part of a file an inclusive range names, None when it lies outside."""
    end = size if last is None else min(last + 1, size)
    return Span(first, end - first) if first < end else None
