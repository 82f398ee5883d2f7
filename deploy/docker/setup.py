"""The containers' first step: `python -m deploy.docker.setup` makes an API key where one is wanted, then what Envoy reads.

The key's text goes into a file of the state volume that only the services' user reads; the log says how to see it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

from deploy import edge
from deploy.edge_settings import EdgeSettings
from services.kit import config, keyring
from services.kit.keyring import Key, keyring_path
from services.kit.settings import SettingsError, load

FILE: Final = "first-api-key"
NAME: Final = "first"
_TIER: Final = "paid"


def ensure_key(settings: EdgeSettings, *, now: float) -> Path | None:
    """Make the first key unless there is one, or anonymous callers are wanted; return the file with its text, if there is one.

    Raises ConfigError, KeyringError, OSError.
    """
    path = settings.state_dir / FILE
    ring = keyring_path(settings.state_dir)
    is_wanted = not (settings.allow_anonymous or settings.secret or config.read(settings.config).data.get("keys"))
    if is_wanted and not keyring.read(ring):
        text = keyring.new_text()
        path.unlink(missing_ok=True)  # of a keyring that was removed
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        keyring.add(ring, Key(NAME, keyring.digest(text), _TIER, created=now), now=now)
    return path if path.exists() else None


def main() -> int:
    """Make the key and write the configuration; return the exit status."""
    try:
        found = ensure_key(load(EdgeSettings), now=time.time())
    except SettingsError as error:
        sys.stderr.writelines(f"setup: {problem}\n" for problem in error.problems)
        return 2
    except (keyring.KeyringError, OSError) as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    status = edge.main()
    if found is not None and status == 0:
        print(f"Callers need an API key. The first one: docker compose exec facade cat {found}")
    return status


if __name__ == "__main__":
    sys.exit(main())
