"""The journal's tables, as the steps that lead from each version to the next. Steps are never changed, only added."""

from typing import Final

STEPS: Final[tuple[str, ...]] = (
    """
    CREATE TABLE responses (
      principal TEXT NOT NULL,
      response_id TEXT NOT NULL,
      previous_id TEXT,
      json BLOB NOT NULL,
      created_ms INTEGER NOT NULL,
      finished INTEGER NOT NULL,
      expires_ms INTEGER NOT NULL,
      size_bytes INTEGER NOT NULL,
      PRIMARY KEY (principal, response_id)
    ) WITHOUT ROWID;
    CREATE INDEX responses_by_end ON responses (expires_ms);
    CREATE INDEX responses_by_age ON responses (created_ms);
    CREATE TABLE input_items (
      principal TEXT NOT NULL,
      response_id TEXT NOT NULL,
      place INTEGER NOT NULL,
      item_id TEXT NOT NULL,
      json BLOB NOT NULL,
      PRIMARY KEY (principal, response_id, place),
      FOREIGN KEY (principal, response_id) REFERENCES responses (principal, response_id) ON DELETE CASCADE
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE images (
      image_id TEXT PRIMARY KEY,
      principal TEXT NOT NULL,
      digest TEXT NOT NULL,
      media_type TEXT NOT NULL,
      size_bytes INTEGER NOT NULL,
      created_ms INTEGER NOT NULL,
      expires_ms INTEGER NOT NULL,
      UNIQUE (principal, digest, media_type)
    ) WITHOUT ROWID;
    CREATE INDEX images_by_end ON images (expires_ms);
    CREATE INDEX images_by_digest ON images (digest);
    """,
)
VERSION: Final = len(STEPS)
