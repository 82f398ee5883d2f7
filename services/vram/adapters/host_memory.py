"""The host's RAM as a device named `cpu`: what the kernel calls available, within the limits of its control groups."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from services.vram.adapters.driver import DriverError, Sight
from services.vram.core.model import Facts, Kind

MIB: Final = 1024 * 1024
DEVICE: Final = "cpu"
_ROOT: Final = Path("/")
_FACTS: Final = Facts(DEVICE, "host memory", Kind.HOST)


class HostMemory:
    """The machine's memory. `root`: where /proc and /sys are found."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._groups: tuple[Path, ...] | None = None

    def read(self, pids: Collection[int]) -> Mapping[str, Sight | DriverError]:
        """Return what is available, and what the processes have allocated. Raises DriverError."""
        # Processes are read before and after: what moves meanwhile counts as not allocated.
        before = self._used(pids)
        total, available = self.available()
        after = self._used(pids)
        used = {pid: min(mib, after[pid]) for pid, mib in before.items() if pid in after}
        return {DEVICE: Sight(_FACTS, total // MIB, min(available, total) // MIB, used)}

    def available(self) -> tuple[int, int]:
        """Return the memory in all and what of it is available without swapping, bytes. Raises DriverError."""
        try:
            info = _numbers((self._root / "proc/meminfo").read_text(encoding="ascii"))
            total, available = info["MemTotal"] * 1024, info["MemAvailable"] * 1024
        except (OSError, KeyError, ValueError) as error:
            raise DriverError(f"/proc/meminfo does not tell: {error}") from error
        for group in self._limited():
            limit, left = _within(group)
            total, available = min(total, limit), min(available, left)
        return total, available

    def _used(self, pids: Collection[int]) -> dict[int, int]:
        """Return what processes have allocated, MiB. Pages of files do not count: the kernel gives them up when asked."""
        found: dict[int, int] = {}
        for pid in pids:
            with suppress(OSError, KeyError, ValueError):
                status = _numbers((self._root / f"proc/{pid}/status").read_text(encoding="utf-8", errors="replace"))
                found[pid] = (status["RssAnon"] + status["RssShmem"]) // 1024
        return found

    def _limited(self) -> tuple[Path, ...]:
        """Return the control groups of this process that may limit memory, of either version."""
        if self._groups is None:
            found: list[Path] = []
            with suppress(OSError, ValueError):
                for line in (self._root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
                    _, controllers, name = line.split(":", 2)
                    if not controllers:
                        found += _up(self._root / "sys/fs/cgroup", name)
                    elif "memory" in controllers.split(","):
                        found += _up(self._root / "sys/fs/cgroup/memory", name)
            self._groups = tuple(found)
        return self._groups


def _up(mount: Path, name: str) -> list[Path]:
    """Return a group and those above it; a container sees its own group as the top."""
    group = mount / name.strip("/")
    return [group, *(each for each in group.parents if each == mount or mount in each.parents)]


def _within(group: Path) -> tuple[int, int]:
    """Return a group's limit and what is left of it, bytes; no limit is as good as endless memory."""
    endless = 2**63
    for limit_file, use_file, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError, KeyError):
            limit = int((group / limit_file).read_text(encoding="ascii"))  # `max` is no number
            used = int((group / use_file).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            return limit, max(0, limit - used + int(stat[idle]))
    return endless, endless


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of lines such as `MemTotal:  24682348 kB`."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        first = value.split()[:1]
        if first and first[0].isdecimal():
            found[name] = int(first[0])
    return found
