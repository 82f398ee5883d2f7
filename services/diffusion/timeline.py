"""When things happened to a request."""

import itertools

from services.kit.clock import Clock


class Timeline:
    """The moments of one request. Begins when it is about to ask for its permit; `computed`: when the engine was done with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked_s = clock.monotonic()
        self._asked_wall_s = clock.wall()
        self._computed_s: float | None = None
        self._load_s: float | None = None
        self._granted_s: float | None = None

    def loading(self) -> None:
        """Note that it waits for its model."""
        if self._load_s is None:
            self._load_s = self._clock.monotonic()

    def granted(self) -> None:
        """Note that permit and model are there."""
        self._granted_s = self._clock.monotonic()

    def computed(self) -> None:
        """Note that the engine is done with it."""
        self._computed_s = self._clock.monotonic()

    def stages(self) -> list[tuple[str, float, float]]:
        """Return name, beginning and end of each stage that was completed, seconds since 1970."""
        moments = {"queue": self._asked_s, "load": self._load_s, "compute": self._granted_s, "": self._computed_s}
        known = [(name, moment_s) for name, moment_s in moments.items() if moment_s is not None]
        return [
            (name, self._wall_s(begin_s), self._wall_s(end_s))
            for (name, begin_s), (_, end_s) in itertools.pairwise(known)
        ]

    def _wall_s(self, moment_s: float) -> float:
        return self._asked_wall_s + moment_s - self._asked_s

    @property
    def queue_ms(self) -> int:
        """Milliseconds spent waiting for the permit."""
        until_s = self._load_s if self._load_s is not None else self._granted_s
        return 0 if until_s is None else round((until_s - self._asked_s) * 1000)

    @property
    def load_ms(self) -> int:
        """Milliseconds spent waiting for the model."""
        if self._load_s is None or self._granted_s is None:
            return 0
        return round((self._granted_s - self._load_s) * 1000)
