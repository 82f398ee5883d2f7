"""Kept pictures in the journal's tables. Every function runs inside one transaction of the journal."""

import sqlite3
from typing import Final

from services.jobs.core.images import Image

_COLUMNS: Final = "image_id, principal, digest, media_type, size_bytes, created_ms, expires_ms"
_PUT: Final = (
    f"INSERT INTO images ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (principal, digest, media_type) "  # noqa: S608 - of constants
    "DO UPDATE SET expires_ms = max(expires_ms, excluded.expires_ms), created_ms = excluded.created_ms RETURNING image_id"
)
_FIND: Final = f"SELECT {_COLUMNS} FROM images WHERE image_id = ? AND expires_ms > ?"  # noqa: S608 - of constants
_OLDEST: Final = "SELECT digest, size_bytes FROM images GROUP BY digest ORDER BY max(created_ms), digest"


def save(connection: sqlite3.Connection, image: Image, total_bytes: int) -> tuple[str, list[str]]:
    """Note a picture; return its id, which is that of the same content saved before, and the digests that made room."""
    gone = expire(connection, now_ms=image.created_ms)
    known = connection.execute("SELECT 1 FROM images WHERE digest = ?", (image.digest,)).fetchone()
    if known is None:
        gone += _make_room(connection, total_bytes - image.size_bytes)
    (image_id,) = connection.execute(
        _PUT,
        (
            image.image_id,
            image.principal,
            image.digest,
            image.media_type,
            image.size_bytes,
            image.created_ms,
            image.expires_ms,
        ),
    ).fetchone()
    return image_id, [each for each in gone if each != image.digest]


def find(connection: sqlite3.Connection, image_id: str, *, now_ms: int) -> Image | None:
    """Return a picture that is not over."""
    row = connection.execute(_FIND, (image_id, now_ms)).fetchone()
    return None if row is None else Image(*row)


def expire(connection: sqlite3.Connection, *, now_ms: int) -> list[str]:
    """Forget what is over; return the digests that nobody needs any more."""
    over = connection.execute("DELETE FROM images WHERE expires_ms <= ? RETURNING digest", (now_ms,)).fetchall()
    digests = {digest for (digest,) in over}
    return sorted(digests - set(known(connection))) if digests else []


def known(connection: sqlite3.Connection) -> list[str]:
    """Return the digests of all kept pictures."""
    return [digest for (digest,) in connection.execute("SELECT DISTINCT digest FROM images")]


def _make_room(connection: sqlite3.Connection, budget: int) -> list[str]:
    """Forget the pictures that were saved longest ago until the rest fits; return their digests."""
    files = connection.execute(_OLDEST).fetchall()
    used = sum(size for _, size in files)
    gone = []
    for digest, size in files:
        if used <= budget:
            break
        gone.append(digest)
        used -= size
    connection.executemany("DELETE FROM images WHERE digest = ?", [(digest,) for digest in gone])
    return gone
