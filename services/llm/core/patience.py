"""How long the next step may wait for requests that are on their way, so that all of them are computed together.

Sixteen requests that are sent at once reach the engine one by one, and while it computes with all cores for the first,
the others are prepared slowly. Waiting a moment puts them into the same steps; that pays as long as it is rare.
"""

from dataclasses import dataclass, replace
from typing import Final

MOST_S: Final = 0.05
SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Patience:
    """`left_s`: how long may be waited at the time `since_s`. It grows by SHARE of the time that passes, to `most_s` at most."""

    left_s: float = MOST_S
    since_s: float = 0.0
    most_s: float = MOST_S

    def at(self, now_s: float) -> "Patience":
        """Return the patience of a later time."""
        return replace(self, left_s=min(self.most_s, self.left_s + SHARE * (now_s - self.since_s)), since_s=now_s)

    def waited(self, seconds: float) -> "Patience":
        """Return what is left after a wait of so many seconds."""
        return replace(self, left_s=max(0.0, self.left_s - seconds))
