"""Prefixes: finished sequences stay in the cache so that a prompt which begins alike need not be computed again.

Those that must leave the cache may stay in host memory, as they were, until prompts ask for them.
"""

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

    @property
    def too_many(self) -> bool:
        """Whether there are more than there may be."""
        return len(self._kept) > self._most

    def keep(self, sequence: int, tokens: Tokens, group: Hashable = None) -> list[int]:
        """Keep a sequence and return those that are of no more use beside it: beginnings of it, or itself if it is one."""
        same = {other: kept for other, (kept, theirs) in self._kept.items() if theirs == group}
        if self._most == 0 or any(_begins(kept, tokens) for kept in same.values()):
            return [sequence]
        useless = [other for other, kept in same.items() if _begins(tokens, kept)]
        for other in useless:
            del self._kept[other]
        self._kept[sequence] = tokens, group
        return useless

    def drop_oldest(self) -> tuple[Source, Hashable]:
        """Forget the least recently used sequence and return it with its group. Raises KeyError when there is none."""
        sequence = next(iter(self._kept), None)
        if sequence is None:
            raise KeyError("no warm prefixes")
        tokens, group = self._kept.pop(sequence)
        return Source(sequence, tokens), group


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A prefix in host memory: `state` is what the engine gave for it, `group` what it was computed with."""

    tokens: Tokens
    state: bytes
    group: Hashable = None

    def holds(self, tokens: Tokens, group: Hashable) -> bool:
        """Return whether it begins with all of these."""
        return self.group == group and _begins(self.tokens, tokens)


class StoredPrefixes:
    """Prefixes in host memory, at most `most_bytes` of them, least recently used first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._stored: list[Stored] = []

    def __len__(self) -> int:
        return len(self._stored)

    def keep(self, new: Stored) -> None:
        """Keep a prefix unless a longer one holds it or it is too large; others go for it, the oldest first."""
        tokens, state, group = new.tokens, new.state, new.group
        if len(state) > self.most_bytes or any(each.holds(tokens, group) for each in self._stored):
            return
        for each in [each for each in self._stored if new.holds(each.tokens, each.group)]:
            self._drop(each)
        while self.used_bytes + len(state) > self.most_bytes:
            self._drop(self._stored[0])
        self._stored.append(new)
        self.used_bytes += len(state)

    def match(self, prompt: Tokens, group: Hashable = None, *, least: int) -> tuple[Stored, int] | None:
        """Return the prefix of a group that shares most with the prompt, if at least `least` tokens, and how many it shares.

        Never the whole prompt, as in `longest_match`. What is returned counts as used.
        """
        sources = [Source(place, each.tokens) for place, each in enumerate(self._stored) if each.group == group]
        match = longest_match(prompt, sources, least=least)
        if match is None:
            return None
        found = self._stored.pop(match.sequence)
        self._stored.append(found)
        return found, match.length

    def _drop(self, stored: Stored) -> None:
        self._stored.remove(stored)
        self.used_bytes -= len(stored.state)


def _begins(whole: Tokens, beginning: Tokens) -> bool:
    return len(beginning) <= len(whole) and common_length(whole, beginning) == len(beginning)
