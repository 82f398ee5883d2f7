"""Due times of many tickets: adding and removing cost the same whatever the number of entries.

A heap of deadlines would keep every entry that was granted long before its deadline, or cost a search to remove it.
Here entries lie in buckets of GRAIN seconds; only the (few) bucket numbers are in a heap.
"""

from heapq import heappop, heappush

GRAIN = 0.010


class Calendar:
    """Which tickets are due when; times are seconds of the caller's clock."""

    __slots__ = ("_buckets", "_earliest", "_order")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, float]] = {}
        # No later than the first due time of each bucket; made exact when a bucket is looked through.
        self._earliest: dict[int, float] = {}
        self._order: list[int] = []

    def add(self, ticket: int, due: float) -> None:
        """Enter a ticket; it must not be entered already."""
        number = int(due / GRAIN)
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = {ticket: due}
            self._earliest[number] = due
            heappush(self._order, number)
        else:
            bucket[ticket] = due
            if due < self._earliest[number]:  # noqa: PLR1730 - a call of min() for every ask shows in the bench
                self._earliest[number] = due

    def remove(self, ticket: int, due: float) -> None:
        """Take out a ticket that was entered with `due`; a ticket that is not there is no error."""
        bucket = self._buckets.get(int(due / GRAIN))
        if bucket is not None:
            bucket.pop(ticket, None)

    def next_due(self) -> float | None:
        """Return when to look again, or None when nothing is entered: no later than the first due time.

        It is at most GRAIN too early, after the first tickets of a bucket have been removed.
        """
        while self._order:
            number = self._order[0]
            if self._buckets[number]:
                return self._earliest[number]
            self._drop_first()
        return None

    def pop_due(self, now: float) -> list[int]:
        """Take out and return every ticket whose time is at most `now`, bucket by bucket, in order of entry."""
        due: list[int] = []
        while self._order and self._earliest[number := self._order[0]] <= now:
            bucket = self._buckets[number]
            reached = [ticket for ticket, time in bucket.items() if time <= now]
            due += reached
            if len(reached) < len(bucket):
                for ticket in reached:
                    del bucket[ticket]
                self._earliest[number] = min(bucket.values())
                break
            self._drop_first()
        return due

    def _drop_first(self) -> None:
        number = heappop(self._order)
        del self._buckets[number], self._earliest[number]
