"""The keys in force: those of the command line, those of omniserve.yaml and the shared secret, read again as files change."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.admission.core.identity import Book
from services.kit import config, keyring, telemetry
from services.kit.keyring import Key, KeyringError, Version

LOOKED_EVERY_S: Final = 0.25
"""How often the files are looked at: a key made or revoked counts well within a second."""

_log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Keys:
    """What is known now. `has_keys`: whether any key was ever made here, also one that is revoked or expired."""

    book: Book
    has_keys: bool


class KeyFiles:
    """Owns the keys. `config_path`: omniserve.yaml, None for none. Raises KeyringError and ConfigError at the first reading.

    Later a file that cannot be read is told to the log once, and what was known stays.
    """

    def __init__(self, *, keyring_path: Path, config_path: Path | None, secret: str) -> None:
        self._keyring_path = keyring_path
        self._config_path = config_path
        self._secret = secret
        self._versions = self._look()
        self.keys = self._read()

    def refresh(self) -> bool:
        """Read the files again if they changed; return whether `keys` is new."""
        versions = self._look()
        if versions == self._versions:
            return False
        self._versions = versions
        try:
            self.keys = self._read()
        except (KeyringError, config.ConfigError) as error:
            _log.error("the keys cannot be read; those known before stay in force", error=str(error))
            return False
        _log.info("keys read", keys=len(self.keys.book.keys))
        return True

    async def watch(self) -> None:
        """Keep `keys` fresh, for ever."""
        while True:
            await asyncio.sleep(LOOKED_EVERY_S)
            self.refresh()

    def _look(self) -> tuple[Version | None, Version | None]:
        configured = None if self._config_path is None else keyring.version(self._config_path)
        return keyring.version(self._keyring_path), configured

    def _read(self) -> Keys:
        found: tuple[Key, ...] = (
            *keyring.read(self._keyring_path),
            *keyring.keys_in(config.read(self._config_path)),
        )
        return Keys(Book.of(found, self._secret), has_keys=bool(found or self._secret))
