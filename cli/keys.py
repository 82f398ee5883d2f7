"""`omniserve keys`: makes, lists and revokes the API keys that are kept beside the mesh's run-time state."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cli.errors import CliError, Exit
from cli.terminal import note, print_table
from services.kit import keyring
from services.kit.keyring import Key, KeyringError

if TYPE_CHECKING:
    from pathlib import Path

_DAY_S = 86_400


def create(state_dir: Path, name: str, *, tier: str, expires_days: float | None) -> None:
    """Make a key and print its text, alone on standard output: nothing keeps it."""
    if expires_days is not None and expires_days <= 0:
        raise CliError(f"--expires is {expires_days:g}: a key lasts longer than no time", code=Exit.USAGE)
    path, now, text = keyring.keyring_path(state_dir), time.time(), keyring.new_text()
    expires = None if expires_days is None else now + expires_days * _DAY_S
    try:
        is_first = not keyring.read(path)
        keyring.add(path, Key(name, keyring.digest(text), tier, created=now, expires=expires), now=now)
    except KeyringError as error:
        raise CliError(str(error)) from error
    print(text)
    note(
        f"Keep it: it is shown this once. Callers send it as `Authorization: Bearer {text[:6]}...`, tier {tier} at most."
    )
    if is_first:
        note("It is the first one: from now on callers without a key are refused, unless OMNISERVE_ALLOW_ANONYMOUS=1.")


def show(state_dir: Path, *, as_json: bool) -> None:
    """Print the keys, never their texts."""
    keys = _read(state_dir)
    now = time.time()
    if as_json:
        print(json.dumps([asdict(key) | {"state": _state(key, now)} for key in keys], indent=2))
        return
    if not keys:
        print(f"there are no keys in {state_dir}; `omniserve keys create NAME` makes one")
        return
    rows = [
        (key.name, key.tier, _state(key, now), _day(key.created), _day(key.expires), key.sha256[:12]) for key in keys
    ]
    print_table(("NAME", "TIER", "STATE", "CREATED", "EXPIRES", "SHA256"), rows)


def revoke(state_dir: Path, name: str) -> None:
    """Revoke a key; the mesh refuses it within a second."""
    try:
        keyring.revoke(keyring.keyring_path(state_dir), name, now=time.time())
    except KeyringError as error:
        raise CliError(str(error)) from error
    note(f"{name} is revoked; requests that run go on.")


def _read(state_dir: Path) -> tuple[Key, ...]:
    try:
        return keyring.read(keyring.keyring_path(state_dir))
    except KeyringError as error:
        raise CliError(str(error)) from error


def _state(key: Key, now: float) -> str:
    if key.revoked is not None:
        return "revoked"
    return "active" if key.is_active(now) else "expired"


def _day(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
