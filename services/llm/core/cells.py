"""Who holds which cells of the KV cache: exact counts although sequences share their beginnings.

A cell holds one token's keys and values for every sequence that contains the token at that place. Sharing arises in one
way only: a new sequence takes over the beginning of another. So cells are kept as runs that are shared as a whole, and
a run is split where a sequence takes over, or gives up, a part of it.
"""


class _Run:
    """Consecutive cells with the same holders."""

    __slots__ = ("holders", "length")

    def __init__(self, length: int, holders: set[int]) -> None:
        self.length = length
        self.holders = holders


class Cells:
    """Counts the cells of one cache. Sequences are numbers; one that holds nothing does not exist."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used = 0
        self._runs: dict[int, list[_Run]] = {}

    @property
    def used(self) -> int:
        """Cells that hold anything."""
        return self._used

    @property
    def free(self) -> int:
        """Cells that hold nothing."""
        return self.capacity - self._used

    def length(self, sequence: int) -> int:
        """Return the tokens of a sequence."""
        return sum(run.length for run in self._runs.get(sequence, ()))

    def exclusive(self, sequence: int) -> int:
        """Return the cells that become free when the sequence goes."""
        return sum(run.length for run in self._runs.get(sequence, ()) if len(run.holders) == 1)

    def extend(self, sequence: int, tokens: int) -> None:
        """Add tokens at the sequence's end, in cells of its own."""
        self._used += tokens
        runs = self._runs.setdefault(sequence, [])
        if runs and len(runs[-1].holders) == 1:
            runs[-1].length += tokens
        else:
            runs.append(_Run(tokens, {sequence}))

    def share(self, source: int, target: int, length: int) -> None:
        """Let `target`, which must hold nothing, begin with the first `length` tokens of `source`."""
        if self._runs.get(target):
            raise ValueError(f"sequence {target} holds cells already")
        if length <= 0:
            return
        taken = self._runs[source][: self._split(source, length)]
        for run in taken:
            run.holders.add(target)
        self._runs[target] = list(taken)

    def cut(self, sequence: int, length: int) -> None:
        """Keep only the first `length` tokens of a sequence; 0 gives up all of it."""
        runs = self._runs.get(sequence)
        if runs is None:
            return
        at = self._split(sequence, length) if length > 0 else 0
        for run in runs[at:]:
            run.holders.discard(sequence)
            if not run.holders:
                self._used -= run.length
        del runs[at:]
        if not runs:
            del self._runs[sequence]

    def _split(self, sequence: int, length: int) -> int:
        """Make a border after `length` tokens for everybody who holds them; return how many runs lie before it."""
        before = 0
        for index, run in enumerate(self._runs[sequence]):
            if before == length:
                return index
            if before + run.length > length:
                head = _Run(length - before, set(run.holders))
                run.length -= head.length
                for holder in run.holders:
                    runs = self._runs[holder]
                    runs.insert(runs.index(run), head)
                return index + 1
            before += run.length
        if before < length:
            raise ValueError(f"sequence {sequence} has {before} tokens, not {length}")
        return len(self._runs[sequence])
