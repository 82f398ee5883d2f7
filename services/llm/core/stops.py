"""Stop strings in streamed text: found across token borders, never shown, and nothing is held back without need."""

from collections.abc import Sequence


class StopMatcher:
    """Watches a text that arrives in pieces for the first stop string that is complete.

    Text that may be the beginning of a stop string is held back until the next pieces decide. When a piece completes
    several stop strings, the one that begins first wins, and of those the longest.
    """

    __slots__ = ("_held", "_hit", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would end every text before it begins")
        self._stops = tuple(stops)
        self._held = ""
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._hit

    def push(self, text: str) -> str:
        """Return the text that may be shown now. After a hit everything is swallowed."""
        if self._hit is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
            at, _, self._hit = min(found)
            self._held = ""
            return seen[:at]
        keep = max(_overlap(seen, stop) for stop in self._stops)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def end(self) -> str:
        """Return what was held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
