"""Service tokens: one secret per service in a file that only its owner can read, made at first start.

A token says which process calls. Files are `<state>/tokens/<service>`, mode 0600, in a directory of mode 0700.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}")
_BYTES = 32


class TokenError(Exception):
    """A token file that cannot be used; the message names the file."""


def tokens_dir(state_dir: Path) -> Path:
    """Return the directory of the token files."""
    return state_dir / "tokens"


def ensure_token(state_dir: Path, service: str) -> str:
    """Return the service's token, making it at the first call.

    Starters that race agree on one token: each writes a file of its own, and the first link to the final name wins.
    Raises ValueError for a name that is no service name, TokenError for a file with anything but a token in it.
    """
    if not _NAME.fullmatch(service):
        raise ValueError(f"{service!r} is no service name: lower-case letters, digits and dashes")
    directory = tokens_dir(state_dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / service
    if not path.exists():
        _create(path, secrets.token_urlsafe(_BYTES))
    path.chmod(0o600)
    return _read(path)


def _create(path: Path, token: str) -> None:
    mine = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink()


def _read(path: Path) -> str:
    token = path.read_text(encoding="ascii", errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise TokenError(f"{path} holds no service token; remove the file and a new one is made at the next start")
    return token


@dataclass(frozen=True, slots=True)
class _Entry:
    service: str
    digest: bytes


class TokenBook:
    """Knows whose token it is. Reads the directory at the first look-up and again whenever it meets a new token."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = tokens_dir(state_dir)
        self._entries: dict[bytes, _Entry] = {}
        self._seen: frozenset[tuple[str, int, int]] = frozenset()

    def service_of(self, token: str) -> str | None:
        """Return the service that owns the token, or None.

        Look-up goes by hash and the hashes are compared in constant time, so timing tells nothing about a token.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        entry = self._entries.get(digest)
        if entry is None and self._reload():
            entry = self._entries.get(digest)
        return entry.service if entry is not None and hmac.compare_digest(entry.digest, digest) else None

    def _reload(self) -> bool:
        """Read the directory again if its files changed; return whether they did."""
        seen = self._listing()
        if seen == self._seen:
            return False
        self._seen = seen
        entries = [entry for name, _, _ in seen if (entry := self._entry(name)) is not None]
        self._entries = {entry.digest: entry for entry in entries}
        return True

    def _listing(self) -> frozenset[tuple[str, int, int]]:
        try:
            with os.scandir(self._directory) as files:
                named = [file for file in files if _NAME.fullmatch(file.name)]
                return frozenset((f.name, f.stat().st_mtime_ns, f.stat().st_ino) for f in named)
        except FileNotFoundError:
            return frozenset()

    def _entry(self, name: str) -> _Entry | None:
        # A damaged file belongs to a service that will refuse to start over it; everybody else goes on.
        with contextlib.suppress(TokenError, FileNotFoundError):
            return _Entry(name, hashlib.sha256(_read(self._directory / name).encode()).digest())
        return None
