"""Fair share between the principals of one tier: start-time fair queueing.

Every ask gets a start tag when it arrives: the later of the tier's virtual time and the end of the same principal's
ask before it, in slots. Serving in the order of tags gives each principal that waits the same number of slots,
however many asks it has in the line; tags never change, so the line needs no reordering.
"""


class FairShare:
    """The tags of one tier."""

    __slots__ = ("_ends", "_forget_at", "_virtual")

    def __init__(self) -> None:
        self._virtual = 0.0
        self._ends: dict[str, float] = {}
        self._forget_at = 64

    def arrived(self, principal: str, units: int) -> float:
        """Return the start tag of a principal's new ask of `units` slots."""
        start = max(self._virtual, self._ends.get(principal, 0.0))
        self._ends[principal] = start + units
        if len(self._ends) > self._forget_at:
            self._forget()
        return start

    def served(self, start: float) -> None:
        """Move virtual time up to the tag of an ask that was granted."""
        self._virtual = max(self._virtual, start)

    def _forget(self) -> None:
        # A principal whose last ask ended in the virtual past is as good as unknown.
        self._ends = {name: end for name, end in self._ends.items() if end > self._virtual}
        self._forget_at = 2 * len(self._ends) + 64
