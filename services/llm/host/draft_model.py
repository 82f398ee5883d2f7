"""A small model of the same vocabulary that proposes what a large one may say.

It has a context of its own, in which it reads the answers that it is asked about, and computes its proposals for all of them
together: one call for what is new in their texts, then one for each further token. It runs between two steps of the large
model, on the same thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from services.llm.core.choose import Floats
from services.llm.core.speculation import MOST_UNLIKE_TOKENS
from services.llm.host.context import DECODED, Batch, Context, Tokens
from services.llm.host.llama import Model, Vocabulary

READ_AT_ONCE: Final = 512
"""Tokens of texts that are read between two steps of the large model, so that a long prompt does not hold up the others."""


class MisfitError(Exception):
    """The draft model speaks another language than the model that it drafts for."""


@dataclass(slots=True, eq=False)
class Reader:
    """The draft model's place in one answer: its sequence, -1 while it has none.

    `read` tokens of the text are computed, then the `guessed` ones.
    """

    number: int = -1
    read: int = 0
    guessed: list[int] = field(default_factory=list)


class Wish(NamedTuple):
    """Who wants at most `most` tokens that may follow prompt and answer."""

    reader: Reader
    prompt: Tokens
    answer: list[int]
    most: int


class _Row(NamedTuple):
    """A text that goes on: `place` of its wish, and its output's row."""

    place: int
    row: int


class DraftModel:
    """Proposes with a context of its own, for at most `sequences` answers at once. `calls`: decode calls so far.

    A proposal ends before a token whose probability is below `min_probability`. `leader`: the context it works for, which
    decides how many threads compute; of its model's tokens are the first `shared_tokens`.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        *,
        leader: Context,
        sequences: int,
        shared_tokens: int,
        min_probability: float,
    ) -> None:
        self.calls = 0
        self._model = model  # the context needs it alive
        self._shared = min(model.vocabulary.size, shared_tokens)
        self._context = context
        self._leader = leader
        self._least = float(np.log(max(min_probability, 1e-9)))
        self._batch = Batch(context.batch_tokens)
        self._numbers = list(range(sequences))
        self._used = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is read."""
        return self._used == 0

    def leave(self, reader: Reader) -> None:
        """Forget an answer that has ended."""
        if reader.number < 0:
            return
        self._cut(reader, 0)
        self._numbers.append(reader.number)
        reader.number = -1

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        """Return what may follow each text: nothing for one that is still being read, or that there is no room for."""
        drafts: list[list[int]] = [[] for _ in wishes]
        self._context.set_threads(self._leader.threads)
        rows = self._read(wishes)
        while rows:
            if not self._compute(wishes):
                return [[] for _ in wishes]
            logits = self._context.logits(len(rows))
            on = [each.place for each in rows if self._guess(logits[each.row], drafts[each.place])]
            on = [place for place in on if len(drafts[place]) < wishes[place].most and self._room() > len(on)]
            rows = self._add_guesses(wishes, drafts, on)
        return drafts

    def _read(self, wishes: Sequence[Wish]) -> list[_Row]:
        """Fill the batch with what is new in the texts; return those that are read to their end by it."""
        self._batch.begin()
        budget = min(READ_AT_ONCE, self._batch.capacity)
        rows: list[_Row] = []
        for place, (reader, prompt, answer, most) in enumerate(wishes):
            if most <= 0 or not self._seat(reader):
                continue
            self._settle(reader, prompt, answer)
            new = _after(reader.read, prompt, answer)
            count = min(len(new), budget)
            if count == 0 or self._room() < count + most:
                continue
            budget -= count
            whole = count == len(new)
            self._batch.add_chunk(new[:count], reader.read, reader.number, outputs=int(whole))
            reader.read += count
            self._used += count
            if whole:
                rows.append(_Row(place, len(rows)))
        if self._batch.size and not rows:
            self._compute(wishes)
        return rows

    def _seat(self, reader: Reader) -> bool:
        if reader.number < 0 and self._numbers:
            reader.number = self._numbers.pop()
        return reader.number >= 0

    def _settle(self, reader: Reader, prompt: Tokens, answer: list[int]) -> None:
        """Keep of what was guessed what the text has become, except its last token, whose output is wanted again."""
        written = answer[reader.read - len(prompt) :] if reader.read >= len(prompt) else []
        kept = 0
        while kept < min(len(reader.guessed), len(written) - 1) and reader.guessed[kept] == written[kept]:
            kept += 1
        self._cut(reader, reader.read + kept)

    def _guess(self, logits: Floats, draft: list[int]) -> bool:
        """Add the likeliest token; False when it is too unlikely, or none."""
        shared = logits[: self._shared]
        token = int(np.argmax(shared))
        best = float(shared[token])
        if -float(np.log(np.exp(shared - best).sum())) < self._least:
            return False
        draft.append(token)
        return True

    def _add_guesses(self, wishes: Sequence[Wish], drafts: list[list[int]], places: list[int]) -> list[_Row]:
        self._batch.begin()
        for place in places:
            reader, guess = wishes[place].reader, drafts[place][-1]
            self._batch.add_one(guess, reader.read + len(reader.guessed), reader.number)
            reader.guessed.append(guess)
            self._used += 1
        return [_Row(place, row) for row, place in enumerate(places)]

    def _compute(self, wishes: Sequence[Wish]) -> bool:
        """Compute the batch; when llama.cpp has no room for it these texts are begun anew."""
        self.calls += 1
        if self._context.decode(self._batch) == DECODED:
            return True
        for wish in wishes:
            if wish.reader.number >= 0:
                self._cut(wish.reader, 0)
        return False

    def _room(self) -> int:
        return self._context.cells - self._used

    def _cut(self, reader: Reader, length: int) -> None:
        """Keep only the first tokens of what was read and guessed."""
        held = reader.read + len(reader.guessed)
        if length < held:
            self._context.cut(reader.number, length)
            self._used -= held - length
        reader.read = length
        reader.guessed.clear()


def _after(read: int, prompt: Tokens, answer: list[int]) -> Tokens:
    """Return the tokens of prompt and answer beyond the first `read`."""
    if read >= len(prompt):
        return np.asarray(answer[read - len(prompt) :], np.int32)
    return np.concatenate([prompt[read:], np.asarray(answer, np.int32)])


def check_vocabulary(draft: Vocabulary, large: Vocabulary) -> None:
    """Raise MisfitError unless tokens mean the same to both, as llama.cpp's own speculation asks."""
    if abs(draft.size - large.size) > MOST_UNLIKE_TOKENS:
        raise MisfitError(f"the draft model knows {draft.size} tokens, the model {large.size}")
    for token in range(min(draft.size, large.size)):
        if draft.piece(token, special=True) != large.piece(token, special=True):
            theirs, ours = draft.piece(token, special=True), large.piece(token, special=True)
            raise MisfitError(f"the draft model's token {token} is {theirs!r}, the model's {ours!r}")
