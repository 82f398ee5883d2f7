"""When things happened to a request."""

from services.kit.clock import Clock


class Timeline:
    """The moments of one request. Begins when it is about to ask for its permit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked_s = clock.monotonic()
        self._load_s: float | None = None
        self._granted_s: float | None = None

    def loading(self) -> None:
        """Note that it waits for its model."""
        if self._load_s is None:
            self._load_s = self._clock.monotonic()

    def granted(self) -> None:
        """Note that permit and model are there."""
        self._granted_s = self._clock.monotonic()

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
