"""Pure arithmetic of interleaved comparisons: order of the sides, medians with their spread, ratios round by round."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of some samples, with the least and the greatest of them."""

    median: float
    least: float
    greatest: float

    def show(self, digits: int) -> str:
        """Text such as `0.98 [0.95-1.02]`."""
        return f"{self.median:.{digits}f} [{self.least:.{digits}f}-{self.greatest:.{digits}f}]"


def spread(samples: Sequence[float]) -> Spread:
    """Median, least and greatest; ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    return Spread(statistics.median(samples), min(samples), max(samples))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Spread of the ratios taken round by round, so that a disturbance of one round touches one ratio only."""
    return spread([our / their for our, their in zip(ours, theirs, strict=True)])


def there_and_back(round_index: int, count: int) -> tuple[int, ...]:
    """Order of `count` sides: 0 1 2, then 2 1 0, so that a drift of the machine favours none."""
    there = tuple(range(count))
    return there if round_index % 2 == 0 else there[::-1]


def abba(round_index: int) -> tuple[int, ...]:
    """Order of two sides: 0 1, then 1 0."""
    return there_and_back(round_index, 2)
