"""How fast a queue drains: what `Retry-After` and the expected wait are made of."""

WINDOW_S = 60.0
FOLD_S = 1.0
LONGEST_S = 3600.0


class DrainRate:
    """Permits released per second of the time in which somebody waited, with older times weighing less.

    Idle time does not count: a quiet pool is not a slow one. A pool that is stuck counts, so the estimate grows with it.
    """

    __slots__ = ("_released", "_seconds", "_since")

    def __init__(self) -> None:
        self._released = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def busy(self, now: float) -> None:
        """Note that somebody waits from now on."""
        self._since = now

    def idle(self, now: float) -> None:
        """Note that nobody waits from now on."""
        self._fold(now)
        self._since = None

    def released(self, now: float) -> None:
        """Count a permit that came back while somebody waits."""
        since = self._since
        if since is not None:
            self._released += 1.0
            if now - since > FOLD_S:
                self._fold(now)

    def per_second(self, now: float) -> float | None:
        """Return the rate, or None while nothing has drained. Less than one second of evidence counts as one."""
        if not self._released:
            return None
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        return self._released if seconds < 1.0 else self._released / seconds

    def seconds_for(self, permits: int, now: float) -> float | None:
        """Return how long `permits` take to drain, at most LONGEST_S, or None while nothing has drained."""
        rate = self.per_second(now)
        if rate is None:
            return None
        seconds = permits / rate
        return min(seconds, LONGEST_S)

    def _fold(self, now: float) -> None:
        if self._since is None:
            return
        self._seconds += now - self._since
        self._since = now
        if self._seconds > WINDOW_S:
            scale = WINDOW_S / 2 / self._seconds
            self._seconds *= scale
            self._released *= scale
