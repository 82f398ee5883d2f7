"""What models were seen to take, kept on disk: better than any estimate from the second load on."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

MIB: Final = 1024 * 1024
_MOST_KEPT: Final = 256


class Footprints:
    """The most that each model was seen to take, MiB, by a key that says how it was run. `folder`: of the file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "footprints.json"
        self._seen: dict[str, int] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):  # without it the next loads are estimated
            found = json.loads(self._path.read_text("utf-8"))
            self._seen = {str(key): int(mib) for key, mib in found.items() if int(mib) > 0}

    def seen_mib(self, key: str) -> int | None:
        """Return the most that was seen, None when it never was."""
        return self._seen.get(key)

    def note(self, key: str, mib: int) -> bool:
        """Take note of what a model takes; True when that is more than ever. Raises OSError when it cannot be kept."""
        if mib <= self._seen.get(key, 0):
            return False
        self._seen.pop(key, None)
        self._seen[key] = mib
        while len(self._seen) > _MOST_KEPT:
            del self._seen[next(iter(self._seen))]
        _write(self._path, self._seen)
        return True


def _write(path: Path, seen: Mapping[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(seen, indent=1), "utf-8")
    part.replace(path)


def allocated_mib(pid: int) -> int | None:
    """Return what a process of this machine has allocated, pages of files left out; None when it is gone."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", errors="replace").splitlines()
        numbers = {
            name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()
        }
        return (int(numbers["RssAnon"]) + int(numbers["RssShmem"])) // 1024
    return None


def is_alive(pid: int) -> bool:
    """Return whether there is such a process here."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
