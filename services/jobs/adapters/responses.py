"""Stored responses in the journal's tables. Every function runs inside one transaction of the journal."""

import sqlite3
from dataclasses import dataclass
from typing import Final

from services.jobs.core.responses import (
    MOST_ITEMS,
    Bounds,
    Item,
    Response,
    Save,
    decide_save,
    unknown_item,
    unknown_response,
)

_FIND: Final = (
    "SELECT response_id, previous_id, json, created_ms, finished, expires_ms FROM responses "
    "WHERE principal = ? AND response_id = ?"
)
_ITEMS: Final = "SELECT item_id, json FROM input_items WHERE principal = ? AND response_id = ? ORDER BY place"
_PLACE: Final = "SELECT place FROM input_items WHERE principal = ? AND response_id = ? AND item_id = ?"
_OLDEST_FIRST: Final = (
    "SELECT json FROM input_items WHERE principal = ? AND response_id = ? AND place > ? ORDER BY place LIMIT ?"
)
_NEWEST_FIRST: Final = (
    "SELECT json FROM input_items WHERE principal = ? AND response_id = ? AND place < ? ORDER BY place DESC LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A response, those before it (oldest first), and whether an older one is gone or beyond the limit."""

    response: Response
    history: tuple[Response, ...]
    history_cut: bool


def save(connection: sqlite3.Connection, principal: str, response: Response, bounds: Bounds, *, now_ms: int) -> None:
    """Store a response, after what is over, and the oldest ones if the store is full. Raises DomainError conflict."""
    connection.execute("DELETE FROM responses WHERE expires_ms <= ?", (now_ms,))
    match decide_save(_one(connection, principal, response.response_id), response):
        case Save.NOTHING:
            return
        case Save.REPLACE:
            delete(connection, principal, response.response_id, now_ms=now_ms)
        case Save.INSERT:
            pass
    _make_room(connection, bounds.total_bytes - response.size_bytes)
    connection.execute(
        "INSERT INTO responses (principal, response_id, previous_id, json, created_ms, finished, expires_ms, size_bytes) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            principal,
            response.response_id,
            response.previous_id,
            response.json,
            response.created_ms,
            response.finished,
            response.expires_ms,
            response.size_bytes,
        ),
    )
    connection.executemany(
        "INSERT INTO input_items (principal, response_id, place, item_id, json) VALUES (?, ?, ?, ?, ?)",
        [
            (principal, response.response_id, place, item.identity, item.json)
            for place, item in enumerate(response.items)
        ],
    )


def _make_room(connection: sqlite3.Connection, budget: int) -> None:
    (used,) = connection.execute("SELECT coalesce(sum(size_bytes), 0) FROM responses").fetchone()
    if used <= budget:
        return
    oldest = connection.execute(
        "SELECT principal, response_id, size_bytes FROM responses ORDER BY created_ms, response_id"
    )
    gone = []
    for principal, response_id, size in oldest:
        if used <= budget:
            break
        gone.append((principal, response_id))
        used -= size
    connection.executemany("DELETE FROM responses WHERE principal = ? AND response_id = ?", gone)


def get(connection: sqlite3.Connection, principal: str, response_id: str, *, history: int, now_ms: int) -> Found:
    """Return a response and at most `history` before it. Raises DomainError not_found."""
    response = _alive(connection, principal, response_id, now_ms)
    before: list[Response] = []
    previous, cut = response.previous_id, False
    while previous is not None and history:
        if len(before) == history:
            cut = True
            break
        earlier = _one(connection, principal, previous)
        if earlier is None or earlier.expires_ms <= now_ms:
            cut = True
            break
        before.append(earlier)
        previous = earlier.previous_id
    return Found(response, tuple(reversed(before)), cut)


def delete(connection: sqlite3.Connection, principal: str, response_id: str, *, now_ms: int) -> bool:
    """Remove a response; return whether it was there for its owner to see."""
    found = connection.execute(
        "DELETE FROM responses WHERE principal = ? AND response_id = ? RETURNING expires_ms", (principal, response_id)
    ).fetchall()
    return any(expires_ms > now_ms for (expires_ms,) in found)


def list_items(
    connection: sqlite3.Connection,
    principal: str,
    response_id: str,
    *,
    ascending: bool,
    after: str | None,
    size: int,
    now_ms: int,
) -> tuple[list[bytes], bool]:
    """Return a page of input items and whether more follow. Raises DomainError not_found."""
    _alive(connection, principal, response_id, now_ms)
    bound = -1 if ascending else MOST_ITEMS
    if after is not None:
        found = connection.execute(_PLACE, (principal, response_id, after)).fetchone()
        if found is None:
            raise unknown_item(after)
        (bound,) = found
    page = _OLDEST_FIRST if ascending else _NEWEST_FIRST
    rows = connection.execute(page, (principal, response_id, bound, size + 1)).fetchall()
    return [json for (json,) in rows[:size]], len(rows) > size


def _alive(connection: sqlite3.Connection, principal: str, response_id: str, now_ms: int) -> Response:
    response = _one(connection, principal, response_id)
    if response is None or response.expires_ms <= now_ms:
        raise unknown_response(response_id)
    return response


def _one(connection: sqlite3.Connection, principal: str, response_id: str) -> Response | None:
    key = (principal, response_id)
    row = connection.execute(_FIND, key).fetchone()
    if row is None:
        return None
    items = connection.execute(_ITEMS, key).fetchall()
    found, previous, json, created_ms, finished, expires_ms = row
    return Response(found, previous, json, tuple(Item(*item) for item in items), created_ms, bool(finished), expires_ms)
