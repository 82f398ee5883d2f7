"""What is proposed for one answer, by whom, and how it does."""

from typing import Final

from services.llm.core import speculation
from services.llm.core.speculation import Lookup
from services.llm.core.wire import SpeculationRules
from services.llm.host.context import Tokens
from services.llm.host.draft_model import Reader

_READ_AT_ONCE: Final = 2048
"""Tokens taken into the index between two steps, so that a long prompt does not hold up the others."""


class Record:
    """What became of the proposals of one source for one answer, in tokens."""

    __slots__ = ("accepted", "drafted", "habit")

    def __init__(self, rules: SpeculationRules) -> None:
        self.habit = speculation.begin(rules)
        self.drafted = 0
        self.accepted = 0


class Drafter:
    """Proposes tokens for one answer and learns what becomes of them.

    What the text said before is asked first, since that costs nothing; where it has no answer, or has been wrong too often,
    the draft model is, if there is one: `reader` is this answer's place with it. `kept`: tokens kept of the last proposal;
    `is_by_model`: whose that was.
    """

    __slots__ = ("_by_lookup", "_by_model", "_draft", "_lookup", "_rules", "is_by_model", "kept", "reader")

    def __init__(self, rules: SpeculationRules, reader: Reader | None = None) -> None:
        self._rules = rules
        self._lookup = Lookup(rules)
        self._by_lookup = Record(rules)
        self._by_model = Record(rules)
        self._draft: list[int] = []
        self.kept = 0
        self.reader = reader
        self.is_by_model = False

    @property
    def drafted(self) -> int:
        """Tokens proposed so far."""
        return self._by_lookup.drafted + self._by_model.drafted

    @property
    def accepted(self) -> int:
        """How many of them were kept."""
        return self._by_lookup.accepted + self._by_model.accepted

    def propose(self, prompt: Tokens, answer: list[int], *, most: int) -> list[int]:
        """Return at most `most` tokens that may follow prompt and answer, by what they said before."""
        self.is_by_model = False
        most = min(most, speculation.wanted(self._by_lookup.habit, answered=len(answer)))
        if most <= 0 or not self._rules.lookup or not self._read(prompt, answer):
            return []
        return self._lookup.propose(most)

    def wanted_of_model(self, *, answered: int, most: int) -> int:
        """Return how many tokens the draft model should propose for an answer of `answered` tokens."""
        self.is_by_model = True
        return min(most, speculation.wanted(self._by_model.habit, answered=answered))

    def begin(self, draft: list[int]) -> None:
        """Say that a proposal has been computed."""
        self._draft, self.kept = draft, 0
        self._record.drafted += len(draft)

    def compare(self, token: int) -> bool:
        """Return whether the token that was chosen is the next one of the proposal."""
        if self.kept == len(self._draft) or self._draft[self.kept] != token:
            return False
        self.kept += 1
        self._record.accepted += 1
        return True

    def learn(self, *, answered: int) -> int:
        """Draw the lesson of the proposal and return how much of it was kept; the answer has `answered` tokens now."""
        if self._draft:
            record = self._record
            record.habit = speculation.learned(
                record.habit, self._rules, proposed=len(self._draft), kept=self.kept, answered=answered
            )
        return self.kept

    @property
    def _record(self) -> Record:
        return self._by_model if self.is_by_model else self._by_lookup

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
