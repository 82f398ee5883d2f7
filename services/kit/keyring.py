"""API keys as they are kept: a name, the SHA-256 of the text and a tier. The text itself exists once, when it is made.

Keys stand in `<state>/keys.json` (made with the command line; mode 0600, replaced in one move, so that a reader sees the
old keys or the new ones) and in the section `keys` of omniserve.yaml. Times are seconds since 1970.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from services.kit.config import ConfigError, Document

TIERS: Final = ("paid", "sub", "free", "background")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Principals that are no key's: who has one of these names would be taken for them.
RESERVED: Final = frozenset(
    {"anonymous", "operator", "shared", "cli", "envoy", "envoy-operator", "envoy-public", "facade"}
    | {"admission", "capacity", "cutout", "diffusion", "jobs", "ledger", "llm", "relay", "speech", "video", "vram"}
)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = "om-"
_BYTES: Final = 32  # 43 url-safe characters


class KeyringError(Exception):
    """Keys that cannot be read or changed; the message names the file or the key."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `sha256`: hex digest of its text. `tier`: the best one it may ask for. `expires`, `revoked`: None is never."""

    name: str
    sha256: str
    tier: str
    created: float | None = None
    expires: float | None = None
    revoked: float | None = None

    def is_active(self, now: float) -> bool:
        """Return whether it lets anybody in."""
        return self.revoked is None and (self.expires is None or now < self.expires)


Version = tuple[int, int, int]
"""What changes when a file is replaced: time of change, size, inode."""


def new_text() -> str:
    """Return the text of a new key: `om-` and 43 url-safe characters."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def digest(text: str) -> str:
    """Return the hex SHA-256 under which a key's text is known."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def keyring_path(state_dir: Path) -> Path:
    """Return where the keys are."""
    return state_dir / "keys.json"


def version(path: Path) -> Version | None:
    """Return the file's version, None while no such file can be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read(path: Path) -> tuple[Key, ...]:
    """Return the keys, revoked and expired ones too; none when there is no such file. Raises KeyringError."""
    try:
        found = json.loads(path.read_bytes())
        return tuple(_key(each) for each in found["keys"])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeyringError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise KeyringError(f"{path} is no keyring: {error or type(error).__name__}") from error


def add(path: Path, key: Key, *, now: float) -> None:
    """Add a key. Raises KeyringError for a bad or reserved name, and for one that an active key has."""
    if problem := _name_problem(key.name):
        raise KeyringError(problem)

    def change(keys: tuple[Key, ...]) -> tuple[Key, ...]:
        if any(each.name == key.name and each.is_active(now) for each in keys):
            raise KeyringError(f"there is a key {key.name!r} already; revoke it first, or take another name")
        return (*keys, key)

    _change(path, change)


def revoke(path: Path, name: str, *, now: float) -> None:
    """Revoke the key of that name. Raises KeyringError when there is none that is not revoked yet."""

    def change(keys: tuple[Key, ...]) -> tuple[Key, ...]:
        if not any(each.name == name and each.revoked is None for each in keys):
            known = ", ".join(sorted({each.name for each in keys if each.revoked is None}))
            raise KeyringError(f"there is no key {name!r} to revoke; there {f'are: {known}' if known else 'is none'}")
        return tuple(replace(e, revoked=now) if e.name == name and e.revoked is None else e for e in keys)

    _change(path, change)


def _change(path: Path, change: Callable[[tuple[Key, ...]], tuple[Key, ...]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _replace(path, change(read(path)))
    except OSError as error:
        raise KeyringError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other writers out; the lock is a file beside, since the keyring itself is replaced."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, keys: Iterable[Key]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()  # left by a writer that was killed, whose process number came round again
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"keys": [asdict(key) for key in keys]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _key(found: dict[str, Any]) -> Key:
    key = Key(**found)
    if problem := _name_problem(key.name) or _value_problem(key):
        raise ValueError(problem)
    return key


def _name_problem(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"{name!r} is no name for a key: up to 64 letters, digits, dots, dashes and underscores"
    return f"{name!r} is the name of another kind of caller; take another one for a key" if name in RESERVED else ""


def _value_problem(key: Key) -> str:
    if not isinstance(key.sha256, str) or not _SHA256.fullmatch(key.sha256):
        return f"the sha256 of key {key.name!r} is not 64 lower-case hex digits"
    if key.tier not in TIERS:
        return f"the tier of key {key.name!r} is none of {', '.join(TIERS)}"
    times = (key.created, key.expires, key.revoked)
    wrong = any(at is not None and (isinstance(at, bool) or not isinstance(at, int | float)) for at in times)
    return f"a time of key {key.name!r} is no number of seconds" if wrong else ""


# ---- the section `keys` of omniserve.yaml ------------------------------------------------------------------------


def _refuse(problem: str) -> None:
    if problem:
        raise ValueError(problem)


def _good_name(name: str) -> str:
    _refuse(_name_problem(name))
    return name


def _good_tier(tier: str) -> str:
    _refuse("" if tier in TIERS else f"{tier!r} is none of {', '.join(TIERS)}")
    return tier


def _good_digest(text: object) -> object:
    """Return it in lower case. The value is not repeated: who mistook the field has put the key itself here."""
    lowered = text.lower() if isinstance(text, str) else ""
    _refuse("" if _SHA256.fullmatch(lowered) else "is no SHA-256: 64 hex digits of the key's text (in quotes)")
    return lowered


def _moment(value: object) -> object:
    """Return seconds since 1970 of a day (its end) or a moment, UTC unless it says otherwise."""
    if isinstance(value, str):
        day = len(value) == len("2026-01-31")
        value = date.fromisoformat(value) if day else datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime.combine(value + timedelta(days=1), time(), UTC).timestamp()
    _refuse("" if value is None else "is no day (2027-01-31) and no moment (2027-01-31T12:00:00Z)")
    return None


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, AfterValidator(_good_name)]
    sha256: Annotated[str, BeforeValidator(_good_digest)]
    tier: Annotated[str, AfterValidator(_good_tier)]
    expires: Annotated[float | None, BeforeValidator(_moment)] = None


def keys_in(document: Document) -> tuple[Key, ...]:
    """Return the keys of omniserve.yaml: a list of name, sha256, tier and, optionally, expires. Raises ConfigError."""
    entries = document.section("keys", list[_Entry]) or []
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        if entry.name in seen:
            raise ConfigError([document.fault(("keys", index, "name"), f"there is another key {entry.name!r}")])
        seen.add(entry.name)
    return tuple(Key(each.name, each.sha256, each.tier, expires=each.expires) for each in entries)
