"""What one pool has seen since its start, and who waits in it: the numbers behind status and pressure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from services.admission.core.entry import Entry
from services.admission.core.model import BEST_FIRST, Modality, Tier


def _by_tier() -> dict[Tier, int]:
    return dict.fromkeys(BEST_FIRST, 0)


@dataclass(slots=True)
class Counters:
    """Totals since start by the tier that was asked for, and the greatest values seen."""

    granted: dict[Tier, int] = field(default_factory=_by_tier)
    rejected: dict[Tier, int] = field(default_factory=_by_tier)
    timed_out: dict[Tier, int] = field(default_factory=_by_tier)
    cancelled: dict[Tier, int] = field(default_factory=_by_tier)
    max_waiting: int = 0
    max_in_use: int = 0


class Census:
    """Who waits, by the tier asked for and modality, longest first: parked, held back and aged waiters included."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[tuple[Tier, Modality], OrderedDict[int, float]] = {}

    def enter(self, entry: Entry) -> None:
        """Count a waiter."""
        group = (entry.ask.tier, entry.ask.modality)
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = OrderedDict()
        queue[entry.ticket] = entry.asked_at

    def leave(self, entry: Entry) -> None:
        """Stop counting a waiter."""
        del self._queues[entry.ask.tier, entry.ask.modality][entry.ticket]

    def groups(self) -> list[tuple[Tier, Modality, int, float]]:
        """Return (tier, modality, how many wait, when the first of them asked) of every group with a waiter."""
        return [
            (tier, modality, len(queue), next(iter(queue.values())))
            for (tier, modality), queue in self._queues.items()
            if queue
        ]
