"""What is proposed for one answer, and how it does."""

from typing import Final

from services.llm.core import speculation
from services.llm.core.speculation import Lookup
from services.llm.core.wire import SpeculationRules
from services.llm.host.context import Tokens

_READ_AT_ONCE: Final = 2048
"""Tokens taken into the index between two steps, so that a long prompt does not hold up the others."""


class Drafter:
    """Proposes tokens for one answer and learns what becomes of them. `drafted`, `accepted`: tokens so far."""

    __slots__ = ("_draft", "_habit", "_kept", "_lookup", "_rules", "accepted", "drafted")

    def __init__(self, rules: SpeculationRules) -> None:
        self._rules = rules
        self._lookup = Lookup(rules)
        self._habit = speculation.begin(rules)
        self._draft: list[int] = []
        self._kept = 0
        self.drafted = 0
        self.accepted = 0

    def propose(self, prompt: Tokens, answer: list[int], *, most: int) -> list[int]:
        """Return at most `most` tokens that may follow prompt and answer."""
        most = min(most, speculation.wanted(self._habit, answered=len(answer)))
        if most <= 0 or not self._read(prompt, answer):
            return []
        return self._lookup.propose(most)

    def begin(self, draft: list[int]) -> None:
        """Say that a proposal has been computed."""
        self._draft, self._kept = draft, 0
        self.drafted += len(draft)

    def compare(self, token: int) -> bool:
        """Return whether the token that was chosen is the next one of the proposal."""
        if self._kept == len(self._draft) or self._draft[self._kept] != token:
            return False
        self._kept += 1
        self.accepted += 1
        return True

    def learn(self, *, answered: int) -> int:
        """Draw the lesson of the proposal and return how much of it was kept; the answer has `answered` tokens now."""
        if self._draft:
            self._habit = speculation.learned(
                self._habit, self._rules, proposed=len(self._draft), kept=self._kept, answered=answered
            )
        return self._kept

    def _read(self, prompt: Tokens, answer: list[int]) -> bool:
        """Bring the index up to date; False when there is too much to read for now."""
        known = len(self._lookup)
        if known < len(prompt):
            self._lookup.extend(prompt[known : known + _READ_AT_ONCE].tolist())
            known = len(self._lookup)
        if known < len(prompt):
            return False
        self._lookup.extend(answer[known - len(prompt) :])
        return True
