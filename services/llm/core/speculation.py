"""Speculation: what may come next is proposed, by prompt lookup (what followed when the text last ended like this) or by a model.

Proposals are computed together with the last token in one step, and each is kept only where the chooser, looking at the
model's output for its place, picks the same token. So a proposal never decides what is said; it only saves steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.llm.core.wire import SpeculationRules

MOST_UNLIKE_TOKENS: Final = 128
"""Tokens that a draft model may have beyond the other's, or lack: models of a family are padded to different sizes."""


class Lookup:
    """The places in one text where each run of tokens stands: the last one that something follows."""

    def __init__(self, rules: SpeculationRules) -> None:
        self._sizes = range(rules.min_ngram, rules.max_ngram + 1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the text's end."""
        for token in tokens:
            place = len(self._tokens)
            for size in self._sizes:
                if size > place:
                    break
                self._after[tuple(self._tokens[place - size :])] = place
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that may come next: what followed the longest run that the text ends with.

        A text that repeats itself up to its end goes on repeating.
        """
        end = len(self._tokens)
        for size in reversed(self._sizes):
            place = self._after.get(tuple(self._tokens[end - size :])) if size <= end else None
            if place is not None:
                period = end - place
                return [self._tokens[place + ahead % period] for ahead in range(most)]
        return []


@dataclass(frozen=True, slots=True)
class Habit:
    """How well the proposals for one answer have done.

    `length`: tokens of the next one. `misses`: proposals in a row of which nothing was kept. `quiet_until`: length of the
    answer at which proposals are tried again.
    """

    length: int
    misses: int = 0
    quiet_until: int = 0


def begin(rules: SpeculationRules) -> Habit:
    """Return the habit of an answer that begins."""
    return Habit(_short(rules))


def wanted(habit: Habit, *, answered: int) -> int:
    """Return how many tokens to propose for an answer of `answered` tokens; 0 while proposals keep missing."""
    return 0 if answered < habit.quiet_until else habit.length


def learned(habit: Habit, rules: SpeculationRules, *, proposed: int, kept: int, answered: int) -> Habit:
    """Return the habit after a proposal of which `kept` tokens were kept; the answer has `answered` tokens now.

    What was kept whole doubles the next proposal, what was kept in part sets its length. After `patience` misses in a row
    nothing is proposed for `probe` tokens; then a single miss is enough.
    """
    if kept == proposed:
        return Habit(min(rules.draft, 2 * habit.length))
    if kept:
        return Habit(kept + 1)
    misses = habit.misses + 1
    if misses >= rules.patience:
        return Habit(_short(rules), rules.patience - 1, answered + rules.probe)
    return Habit(_short(rules), misses)


def _short(rules: SpeculationRules) -> int:
    return min(2, rules.draft)
