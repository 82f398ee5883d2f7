"""Warm prefixes: finished sequences stay in the cache so that a prompt which begins alike need not be computed again."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Source:
    """A sequence whose beginning may be shared; `tokens` are those whose cells are computed."""

    sequence: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Match:
    """What to share: the first `length` tokens of `sequence`."""

    sequence: int
    length: int


def common_length(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    length = min(len(one), len(other))
    if length == 0 or one[0] != other[0]:
        return 0
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def longest_match(prompt: Tokens, sources: Iterable[Source], *, least: int) -> Match | None:
    """Return the source that shares most with the prompt, if it is at least `least` tokens.

    Never the whole prompt: the last token must be computed, since its output starts the answer.
    """
    best: Match | None = None
    for source in sources:
        length = min(common_length(prompt, source.tokens), len(prompt) - 1)
        if length >= least and (best is None or length > best.length):
            best = Match(source.sequence, length)
    return best


class WarmPrefixes:
    """The sequences that stay after their request has ended, least recently used first.

    `group`: what they were computed with; nothing is shared between groups.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[int, tuple[Tokens, Hashable]] = {}  # in the order of use

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._kept

    def sources(self, group: Hashable = None) -> list[Source]:
        """Return all of a group, most recently used first."""
        kept = reversed(self._kept.items())
        return [Source(sequence, tokens) for sequence, (tokens, theirs) in kept if theirs == group]

    def touch(self, sequence: int) -> None:
        """Say that a sequence was used just now."""
        if sequence in self._kept:
            self._kept[sequence] = self._kept.pop(sequence)

    def keep(self, sequence: int, tokens: Tokens, group: Hashable = None) -> list[int]:
        """Keep a sequence and return those to drop for it: beginnings of it, then the oldest, perhaps itself."""
        same = {other: kept for other, (kept, theirs) in self._kept.items() if theirs == group}
        if self._most == 0 or any(_begins(kept, tokens) for kept in same.values()):
            return [sequence]
        drop = [other for other, kept in same.items() if _begins(tokens, kept)]
        for other in drop:
            del self._kept[other]
        if len(self._kept) >= self._most:
            drop.append(self.drop_oldest())
        self._kept[sequence] = tokens, group
        return drop

    def drop_oldest(self) -> int:
        """Forget the least recently used sequence and return it. Raises KeyError when there is none."""
        sequence = next(iter(self._kept), None)
        if sequence is None:
            raise KeyError("no warm prefixes")
        del self._kept[sequence]
        return sequence


def _begins(whole: Tokens, beginning: Tokens) -> bool:
    return len(beginning) <= len(whole) and common_length(whole, beginning) == len(beginning)
