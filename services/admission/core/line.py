"""The waiting line of one pool: by tier, then by arrival (or by fair share).

Entering, leaving and looking at the head cost the same whatever the length of the line. Each tier has one lane per modality, so that a hold closes a lane instead of being stepped over waiter by waiter.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator
from heapq import heapify, heappop, heappush, merge

from services.admission.core.entry import Entry, Key
from services.admission.core.model import BEST_FIRST, Modality, Tier

_BEFORE_ALL: Key = (-1.0, -1)


class Lane:
    """Waiters of one tier and modality in the order of their keys.

    Newcomers come in order and are appended. Whoever comes back to an earlier place (ready after park, aged into the
    tier) goes to a small heap beside it; leaving the heap is lazy, and it is rebuilt when most of it is gone.
    """

    __slots__ = ("_fifo", "_last_key", "_late", "_late_live")

    def __init__(self) -> None:
        self._fifo: OrderedDict[int, Entry] = OrderedDict()
        self._last_key = _BEFORE_ALL
        self._late: list[tuple[Key, int]] = []
        self._late_live: dict[int, Entry] = {}

    def add(self, entry: Entry) -> None:
        """Put a waiter at the place of its key."""
        if entry.key > self._last_key or not self._fifo:
            self._fifo[entry.ticket] = entry
            self._last_key = entry.key
        else:
            self._late_live[entry.ticket] = entry
            heappush(self._late, (entry.key, entry.ticket))

    def remove(self, entry: Entry) -> None:
        """Take a waiter out, wherever it stands."""
        if self._fifo.pop(entry.ticket, None) is None:
            del self._late_live[entry.ticket]
            if len(self._late) > 2 * len(self._late_live) + 16:
                self._late = [(late.key, late.ticket) for late in self._late_live.values()]
                heapify(self._late)

    def head(self) -> Entry | None:
        """Return the first waiter, or None."""
        first = next(iter(self._fifo.values())) if self._fifo else None
        if not self._late_live:
            return first
        late = self._late_head()
        return late if first is None or late.key < first.key else first

    def in_order(self) -> Iterator[Entry]:
        """Walk the waiters, first to last."""
        if not self._late_live:
            return iter(self._fifo.values())
        return merge(self._fifo.values(), sorted(self._late_live.values(), key=_key), key=_key)

    def _late_head(self) -> Entry:
        while (entry := self._late_live.get(self._late[0][1])) is None:
            heappop(self._late)
        return entry


class Line:
    """All waiters of a pool, ordered by tier and then by key."""

    __slots__ = ("_lanes", "counts")

    def __init__(self) -> None:
        self._lanes: dict[Tier, dict[Modality, Lane]] = {tier: {} for tier in BEST_FIRST}
        # By tier number: the waiters of a tier and all better ones are the sum of a slice.
        self.counts = [0] * (BEST_FIRST[0] + 1)

    def add(self, entry: Entry) -> None:
        """Put a waiter at its place."""
        lanes = self._lanes[entry.tier]
        lane = lanes.get(entry.ask.modality)
        if lane is None:
            lane = lanes[entry.ask.modality] = Lane()
        lane.add(entry)
        self.counts[entry.tier] += 1

    def remove(self, entry: Entry) -> None:
        """Take a waiter out."""
        self._lanes[entry.tier][entry.ask.modality].remove(entry)
        self.counts[entry.tier] -= 1

    def served_before(self, tier: Tier) -> int:
        """Count the waiters of this tier and of all better ones."""
        return sum(self.counts[tier:])

    def head(self, closed: Container[Modality]) -> Entry | None:
        """Return whoever is next among the modalities that are not closed."""
        for tier in BEST_FIRST:
            if not self.counts[tier]:
                continue
            first: Entry | None = None
            for modality, lane in self._lanes[tier].items():
                if modality in closed:
                    continue
                entry = lane.head()
                if entry is not None and (first is None or entry.key < first.key):
                    first = entry
            if first is not None:
                return first
        return None

    def in_order(self) -> Iterator[Entry]:
        """Walk the whole line, next to last, closed lanes included."""
        for tier in BEST_FIRST:
            lanes = self._lanes[tier]
            if len(lanes) == 1:
                yield from next(iter(lanes.values())).in_order()
            elif lanes:
                yield from merge(*(lane.in_order() for lane in lanes.values()), key=_key)


def _key(entry: Entry) -> Key:
    return entry.key
