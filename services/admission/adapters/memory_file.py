"""What must survive a restart, in a small JSON file: the epoch, known sessions and holds in force."""

import json
import os
import time
from pathlib import Path

from services.admission.core.desk import Memory
from services.admission.core.model import Hold, Modality
from services.admission.core.remains import Use
from services.kit import telemetry

_log = telemetry.logger(__name__)


class MemoryFile:
    """Reads and writes the file; times in it are seconds since 1970, times in Memory are on the desk's clock.

    `ahead_s`: what must be added to the desk's clock to get seconds since 1970.
    """

    def __init__(self, path: Path, *, ahead_s: float) -> None:
        self._path = path
        self._ahead_s = ahead_s

    def read(self) -> tuple[int, Memory]:
        """Return the epoch of the process before and what it remembered; (0, nothing) when there is no such file.

        A file that cannot be read is set aside: its sessions are then unknown, which costs running work nothing, and
        the seconds since 1970 stand for its epoch, so that epochs still grow.
        """
        try:
            found = json.loads(self._path.read_text())
            epoch = int(found["epoch"])
            sessions = tuple((str(name), str(service)) for name, service in found["sessions"])
            holds = tuple(self._hold(each) for each in found["holds"])
            uses = tuple(_use(each) for each in found.get("uses", ()))
        except FileNotFoundError:
            return 0, Memory((), ())
        except (ValueError, KeyError, TypeError) as error:
            _log.error("the memory of the process before cannot be read", path=str(self._path), error=str(error))
            self._path.replace(self._path.with_suffix(".unreadable"))
            return int(time.time()), Memory((), ())
        return epoch, Memory(sessions, holds, uses)

    def write(self, epoch: int, memory: Memory) -> None:
        """Replace the file in one move."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {
                "epoch": epoch,
                "sessions": memory.sessions,
                "holds": [
                    {
                        "hold_id": hold.hold_id,
                        "pools": sorted(hold.pools),
                        "modalities": sorted(hold.modalities),
                        "until_unix_s": hold.until + self._ahead_s,
                        "reason": hold.reason,
                    }
                    for hold in memory.holds
                ],
                "uses": memory.uses,
            }
        )
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        # No fsync: it is for processes that outlive this one, and none outlives a power cut.
        temporary.write_text(text)
        temporary.replace(self._path)

    def _hold(self, found: dict[str, object]) -> Hold:
        return Hold(
            hold_id=str(found["hold_id"]),
            pools=frozenset(str(name) for name in _list(found["pools"])),
            modalities=frozenset(Modality(int(str(number))) for number in _list(found["modalities"])),
            until=float(str(found["until_unix_s"])) - self._ahead_s,
            reason=str(found["reason"]),
        )


def _use(found: object) -> Use:
    upstream, pool, modality, units = _list(found)
    return Use(str(upstream), str(pool), Modality(int(str(modality))), int(str(units)))


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {value!r}")
    return value
