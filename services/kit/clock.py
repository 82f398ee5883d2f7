"""Time as a value: what decides gets a clock, what tests decides gets a manual one."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of time, both in seconds."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back. For durations and deadlines."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970. For what is shown or stored."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wall(self) -> float:
        """Return `time.time()`."""
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, *, monotonic: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        """Return the seconds it was set to, plus every advance."""
        return self._monotonic

    def wall(self) -> float:
        """Return the seconds since 1970 it was set to, plus every advance."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both readings forward. Raises ValueError for a negative number."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds} s")
        self._monotonic += seconds
        self._wall += seconds
