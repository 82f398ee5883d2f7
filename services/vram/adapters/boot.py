"""This boot of the machine: its name, and a clock that goes on while the machine sleeps and restarts with it."""

import time
from pathlib import Path
from typing import Final

import psutil

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class BootClock:
    """Seconds since the boot, suspended time included: what is stored stays right for other processes of this boot."""

    def monotonic(self) -> float:
        """Return seconds since the boot."""
        return time.clock_gettime(_CLOCK)

    def wall(self) -> float:
        """Return seconds since 1970."""
        return time.time()


# Elsewhere than on Linux the monotonic clock counts from the boot as well.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_id() -> str:
    """Return what differs from boot to boot."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"boot-{int(psutil.boot_time())}"
