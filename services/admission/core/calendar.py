"""Due times of many tickets: adding and removing cost the same whatever the number of entries.

A heap of deadlines would keep every entry that was granted long before its deadline, or cost a search to remove it.
Here entries lie in buckets of GRAIN seconds; only the (few) bucket numbers are in a heap.
"""

from heapq import heappop, heappush

GRAIN = 0.010


class Calendar:
    """Which tickets are due when; times are seconds of the caller's clock."""

    __slots__ = ("_buckets", "_order")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, float]] = {}
        self._order: list[int] = []

    def add(self, ticket: int, due: float) -> None:
        """Enter a ticket; it must not be entered already."""
        number = int(due / GRAIN)
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = {ticket: due}
            heappush(self._order, number)
        else:
            bucket[ticket] = due

    def remove(self, ticket: int, due: float) -> None:
        """Take out a ticket that was entered with `due`; a ticket that is not there is no error."""
        bucket = self._buckets.get(int(due / GRAIN))
        if bucket is not None:
            bucket.pop(ticket, None)

    def next_due(self) -> float | None:
        """Return the earliest due time, or None when nothing is entered."""
        while self._order:
            bucket = self._buckets[self._order[0]]
            if bucket:
                return min(bucket.values())
            self._drop_first()
        return None

    def pop_due(self, now: float) -> list[int]:
        """Take out and return every ticket whose time is at most `now`, bucket by bucket, in order of entry."""
        due: list[int] = []
        while self._order and self._order[0] * GRAIN <= now:
            bucket = self._buckets[self._order[0]]
            reached = [ticket for ticket, time in bucket.items() if time <= now]
            due += reached
            if len(reached) < len(bucket):
                for ticket in reached:
                    del bucket[ticket]
                break
            self._drop_first()
        return due

    def _drop_first(self) -> None:
        del self._buckets[heappop(self._order)]
