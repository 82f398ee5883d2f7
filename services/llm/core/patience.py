"""How long the next step may wait for requests that are on their way, so that all of them are computed together.

Sixteen requests that are sent at once reach the engine one by one, and while it computes with all cores for the first,
the others are prepared slowly. Waiting a moment puts them into the same steps; that pays as long as it is rare, and as long
as it is short beside the step that they would have to wait for.
"""

from dataclasses import dataclass, replace
from typing import Final

LEAST_S: Final = 0.05
OF_A_STEP: Final = 0.5
SHARE: Final = 0.05


def most_s(step_s: float) -> float:
    """Return how long a step that is expected to take `step_s` seconds may be put off at the very most."""
    return max(LEAST_S, OF_A_STEP * step_s)


@dataclass(frozen=True, slots=True)
class Patience:
    """`left_s`: how long may be waited at the time `since_s`. It grows by SHARE of the time that passes."""

    left_s: float = 0.0
    since_s: float = 0.0

    def at(self, now_s: float, most_s: float) -> "Patience":
        """Return the patience of a later time, `most_s` at most."""
        return Patience(min(most_s, self.left_s + SHARE * (now_s - self.since_s)), now_s)

    def waited(self, seconds: float) -> "Patience":
        """Return what is left after a wait of so many seconds."""
        return replace(self, left_s=max(0.0, self.left_s - seconds))
