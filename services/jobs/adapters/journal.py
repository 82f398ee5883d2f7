"""The journal: one SQLite file in WAL mode, one connection, one thread that owns it. What is answered is on the disk."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from services.jobs.core.schema import STEPS, VERSION
from services.kit.errors import DomainError, Reason

R = TypeVar("R")

_BUSY_MS: Final = 5_000


class JournalError(Exception):
    """The journal cannot be used; says which file and why."""


class Journal:
    """Runs work on the connection, one piece after the other, each in a transaction of its own."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread

    async def run(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Return what the work returns, once it is committed; an exception takes everything back.

        A caller that leaves does not stop work that has begun. Raises DomainError no_capacity when the disk is full or
        broken.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[sqlite3.Connection], R]) -> R:
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return work(self._connection)
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            raise DomainError(Reason.NO_CAPACITY, f"the journal cannot be used: {error}") from error


@asynccontextmanager
async def open_journal(path: Path) -> AsyncIterator[Journal]:
    """Open the journal for the length of a block, making it or bringing it up to date. Raises JournalError."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
    loop = asyncio.get_running_loop()
    try:
        connection = await loop.run_in_executor(thread, _connect, path)
        try:
            yield Journal(connection, thread)
        finally:
            await loop.run_in_executor(thread, connection.close)
    finally:
        thread.shutdown(wait=False)


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        _bring_up_to_date(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise JournalError(f"{path} cannot be used: {error}") from error
    except JournalError:
        connection.close()
        raise
    return connection


def _bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise JournalError(
            f"{path} has version {version}, this program knows up to {VERSION}: it is older than its data"
        )
    for step in range(version, VERSION):
        connection.executescript(f"BEGIN IMMEDIATE; {STEPS[step]} PRAGMA user_version={step + 1}; COMMIT;")
