"""What goes into a step: whose tokens, and where in the batch they stand."""

from typing import Final, NamedTuple

from services.llm.core import planner
from services.llm.core.adapters import AdapterSet
from services.llm.core.planner import Pace, StepLimits
from services.llm.host.context import Batch
from services.llm.host.draft_model import DraftModel, Wish
from services.llm.host.roster import Roster
from services.llm.host.sequence import Sequence

_TOLD_AT_ONCE: Final = 64
"""Outputs of prompts in one step: each is a row as wide as the vocabulary, and llama.cpp keeps the room for the most there were."""


class Share(NamedTuple):
    """A sequence's part of a step: so many `tokens` of its prompt, or its last token and the `draft` that may follow."""

    sequence: Sequence
    tokens: int
    draft: list[int]


class Row(NamedTuple):
    """Outputs of a step for one sequence: that of the batch's entry `entry`, and those of its draft behind it.

    `told`: outputs before them that only tell how likely the prompt's next tokens are; `answers` is false when there are no others.
    """

    sequence: Sequence
    entry: int
    draft: list[int]
    told: int = 0
    answers: bool = True

    @property
    def outputs(self) -> int:
        """How many there are in all."""
        return self.told + (1 + len(self.draft) if self.answers else 0)


def plan(roster: Roster, pace: Pace, limits: StepLimits, *, adapters: AdapterSet) -> list[Share]:
    """Return how many tokens of whom, among those with these adapters, go into the step; makes room for them first."""
    while True:
        taking_part = [s for s in roster.active if s.submit.adapters == adapters]
        decoding = [s for s in taking_part if s.pending is not None]
        if roster.make_room(len(decoding)):
            break
        roster.suspend_one()
    prefilling = [s for s in taking_part if s.pending is None]
    if not prefilling:
        room = min(limits.batch_tokens, roster.cells.free) - len(decoding)
        return _with_drafts(decoding, roster.draft_model, room=room)
    shares = [Share(sequence, 1, []) for sequence in decoding]
    remaining = _to_read(prefilling)
    budget = planner.prefill_budget(pace, limits, decoding=len(decoding), prefilling=len(prefilling))
    wanted = min(budget, sum(remaining))
    roster.make_room(len(decoding) + wanted)
    budget = min(budget, roster.cells.free - len(decoding))
    if budget <= 0 and not decoding:
        roster.suspend_one()
        return []
    counts = planner.share_prefill(remaining, budget)
    shares += [Share(sequence, count, []) for sequence, count in zip(prefilling, counts, strict=True) if count]
    return shares


def _to_read(prefilling: list[Sequence]) -> list[int]:
    """Return how much of each prompt may be read in now."""
    telling = sum(sequence.told is not None for sequence in prefilling)
    most = _TOLD_AT_ONCE // max(telling, 1)
    remaining = [len(sequence.prompt) - sequence.computed for sequence in prefilling]
    return [left if s.told is None else min(left, most) for s, left in zip(prefilling, remaining, strict=True)]


def _with_drafts(decoding: list[Sequence], model: DraftModel | None, *, room: int) -> list[Share]:
    """Return the last token of each sequence, and what may follow it as far as there is room for that."""
    shares = []
    left: list[Share] = []
    for sequence in decoding:
        draft: list[int] = []
        share = Share(sequence, 1, draft)
        if sequence.drafter is not None:
            most = min(room, sequence.room - 1)
            draft += sequence.drafter.propose(sequence.prompt, sequence.generated, most=most)
            room -= len(draft)
            if not draft and sequence.drafter.reader is not None:
                left.append(share)
        shares.append(share)
    if left and model is not None:
        _ask_model(left, model, room=room)
    return shares


def _ask_model(shares: list[Share], model: DraftModel, *, room: int) -> None:
    """Let the draft model propose what may follow, as far as there is room."""
    wishes = []
    for sequence, _, _ in shares:
        assert sequence.drafter is not None  # noqa: S101 - only such are asked for
        assert sequence.drafter.reader is not None  # noqa: S101 - as above
        most = max(0, min(room, sequence.room - 1))
        most = sequence.drafter.wanted_of_model(answered=len(sequence.generated), most=most)
        room -= most
        wishes.append(Wish(sequence.drafter.reader, sequence.prompt, sequence.generated, most))
    for share, draft in zip(shares, model.propose(wishes), strict=True):
        share.draft.extend(draft)


def fill(batch: Batch, shares: list[Share]) -> list[Row]:
    """Write the batch; return whose outputs are wanted, with the entry they are at."""
    batch.begin()
    rows: list[Row] = []
    for sequence, count, draft in shares:
        at = sequence.computed
        if sequence.pending is not None:
            rows.append(Row(sequence, batch.size, draft))
            batch.add_one(sequence.pending, at, sequence.cells)
            for ahead, token in enumerate(draft, 1):
                batch.add_one(token, at + ahead, sequence.cells)
            continue
        last = at + count == len(sequence.prompt)
        told = 0 if sequence.told is None else count - last
        batch.add_chunk(sequence.prompt[at : at + count], at, sequence.cells, outputs=told + last)
        if told or last:
            rows.append(Row(sequence, batch.size - 1, [], told, last))
    return rows
