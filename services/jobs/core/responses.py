"""Stored responses: what may be stored, for how long, and what replaces what."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.kit.errors import DomainError, Reason

_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MOST_HISTORY: Final = 1_000
MOST_ITEMS: Final = 10_000
DEFAULT_PAGE: Final = 20
LARGEST_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class Item:
    """One input item. `identity`: its id, for paging; `json`: as it is told to callers."""

    identity: str
    json: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """One response with its input. Times are milliseconds since 1970."""

    response_id: str
    previous_id: str | None
    json: bytes
    items: tuple[Item, ...]
    created_ms: int
    finished: bool
    expires_ms: int

    @property
    def size_bytes(self) -> int:
        """What it counts for in the store's budget."""
        return len(self.json) + sum(len(item.json) for item in self.items)


@dataclass(frozen=True, slots=True)
class Bounds:
    """`ttl_ms`: longest and default life. `response_bytes`: largest response. `total_bytes`: all of them together."""

    ttl_ms: int
    response_bytes: int
    total_bytes: int


class Save(Enum):
    """What storing a response means."""

    INSERT = "insert"
    REPLACE = "replace"
    NOTHING = "nothing"


def check_id(path: str, value: str) -> str:
    """Return the id; DomainError invalid_request when it is none."""
    if not _ID.fullmatch(value):
        raise _refusal(path, f"must have 1 to 128 letters, digits and . _ : -, not {value[:60]!r}")
    return value


def check_response(response: Response, bounds: Bounds, *, now_ms: int) -> Response:
    """Return the response with its end decided; DomainError invalid_request or too_large when it may not be stored."""
    check_id("response.response_id", response.response_id)
    if response.previous_id is not None:
        check_id("response.previous_response_id", response.previous_id)
        if response.previous_id == response.response_id:
            raise _refusal("response.previous_response_id", "names the response itself")
    if len(response.items) > MOST_ITEMS:
        raise _refusal("response.input_items_json", f"has {len(response.items)} items; at most {MOST_ITEMS} are kept")
    seen: set[str] = set()
    for place, item in enumerate(response.items):
        path = f"response.input_items_json[{place}].id"
        if check_id(path, item.identity) in seen:
            raise _refusal(path, f"is {item.identity!r} a second time")
        seen.add(item.identity)
    if response.size_bytes > bounds.response_bytes:
        message = (
            f"the response and its input have {response.size_bytes} bytes; at most {bounds.response_bytes} are kept"
        )
        raise DomainError(Reason.TOO_LARGE, message, field="response")
    latest = now_ms + bounds.ttl_ms
    expires_ms = min(response.expires_ms, latest) if response.expires_ms else latest
    if expires_ms <= now_ms:
        raise _refusal("response.expires_unix_ms", f"is {response.expires_ms}, which is over")
    return Response(
        response.response_id,
        response.previous_id,
        response.json,
        response.items,
        response.created_ms,
        response.finished,
        expires_ms,
    )


def decide_save(stored: Response | None, response: Response) -> Save:
    """Return what to do; DomainError conflict when a finished response would change."""
    if stored is None:
        return Save.INSERT
    if not stored.finished:
        return Save.REPLACE
    same = (stored.json, stored.items, stored.previous_id) == (response.json, response.items, response.previous_id)
    if same and response.finished:
        return Save.NOTHING
    message = f"response {response.response_id!r} is finished and has other contents"
    raise DomainError(Reason.CONFLICT, message, field="response.response_id")


def check_history(wanted: int) -> int:
    """Return how many responses before are wanted; DomainError invalid_request for too many."""
    if wanted > MOST_HISTORY:
        raise _refusal("history", f"is {wanted}; at most {MOST_HISTORY} are told at once")
    return wanted


def check_page(size: int) -> int:
    """Return the size of a page; DomainError invalid_request for too many items."""
    if size > LARGEST_PAGE:
        raise _refusal("page_size", f"is {size}; at most {LARGEST_PAGE} are told at once")
    return size or DEFAULT_PAGE


def unknown_response(response_id: str) -> DomainError:
    """Return the refusal of a response that is not there, is over, or is somebody else's: callers cannot tell which."""
    return DomainError(Reason.NOT_FOUND, f"there is no response {response_id!r}", field="response_id")


def unknown_item(item_id: str) -> DomainError:
    """Return the refusal of an item that a page should begin after."""
    return DomainError(Reason.NOT_FOUND, f"the response has no input item {item_id[:128]!r}", field="after")


def _refusal(path: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {sentence}", field=path)
