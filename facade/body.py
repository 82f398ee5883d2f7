"""Reads request bodies: counted while they arrive, and big ones parsed beside the event loop."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import Request

from facade.multipart import is_form, parts_of
from facade.translate.body import parse_object
from facade.translate.forms import form_values
from facade.translate.record import Record
from services.kit.errors import DomainError, Reason

T = TypeVar("T")

MIB: Final = 1024 * 1024
# From here on, parsing and checking takes milliseconds, for which nobody else's stream should stand still.
_BESIDE_THE_LOOP_BYTES: Final = 128 * 1024


async def read_request(
    request: Request, translate: Callable[[Mapping[str, Any]], T], *, limit_mib: int, may_be_empty: bool = False
) -> T:
    """Read a JSON body and translate it; an empty one, where it may be, is an object without members.

    Raises DomainError too_large, invalid_request, unsupported, or cancelled.
    """
    body = await read_body(request, limit_mib=limit_mib)
    if may_be_empty and not body.strip():
        return translate({})
    if len(body) < _BESIDE_THE_LOOP_BYTES:
        return translate(parse_object(body))
    return await asyncio.to_thread(lambda: translate(parse_object(body)))


async def read_form_or_json(
    request: Request, table: Record, translate: Callable[[Mapping[str, Any]], T], *, limit_mib: int
) -> T:
    """Read a form whose fields `table` describes, or a JSON body, and translate it. Raises DomainError as read_request."""
    content_type = request.headers.get("content-type", "")
    if not is_form(content_type):
        return await read_request(request, translate, limit_mib=limit_mib)
    body = await read_body(request, limit_mib=limit_mib)
    if len(body) < _BESIDE_THE_LOOP_BYTES:
        return translate(form_values(table, parts_of(body, content_type)))
    return await asyncio.to_thread(lambda: translate(form_values(table, parts_of(body, content_type))))


async def read_body(request: Request, *, limit_mib: int) -> bytes:
    """Return the body.

    Raises DomainError too_large as soon as it is over the limit, cancelled when the caller leaves, unsupported for a
    compressed one: what it would unpack to is not bounded by its own size.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        sentence = f"The body has content-encoding {encoding[:40]!r}; send it as it is."
        raise DomainError(Reason.UNSUPPORTED, sentence, field="content-encoding")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_mib * MIB:
        raise _too_large(limit_mib)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise DomainError(Reason.CANCELLED, "The caller left before the whole request had arrived.")
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit_mib * MIB:
            raise _too_large(limit_mib)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(limit_mib: int) -> DomainError:
    return DomainError(Reason.TOO_LARGE, f"The request body is larger than the limit of {limit_mib} MiB.")
