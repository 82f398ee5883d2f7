"""Who runs: requests that wait, sequences that are computed, those that had to give way, and warm prefixes.

Keeps llama.cpp's memory and our count of its cells in step.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from services.llm.core import room
from services.llm.core.adapters import AdapterSet
from services.llm.core.cells import Cells
from services.llm.core.prefix import Source, Stored, StoredPrefixes, WarmPrefixes, longest_match
from services.llm.core.wire import Counters, Failure, SpeculationRules, Submit, unpack_tokens
from services.llm.host.context import Context, Tokens
from services.llm.host.draft_model import DraftModel, Reader
from services.llm.host.drafting import Drafter
from services.llm.host.llama import LlamaError
from services.llm.host.sampling import Chooser
from services.llm.host.sequence import NO_CELLS, Sequence

LEAST_SHARED: Final = 16
"""Shorter beginnings are computed again: looking after them costs more."""
RESUME_MARGIN: Final = 32
"""Free cells per sequence before a suspended one comes back, so that it is not sent away again at once."""


class Roster:
    """The sequences of an engine. `shares`: whether the model's memory lets sequences share their beginnings."""

    def __init__(
        self,
        context: Context,
        counters: Counters,
        chooser: Callable[[Sequence], Chooser],
        *,
        slots: int,
        warm_sequences: int,
        shares: bool,
        speculation: SpeculationRules,
        stored_bytes: int,
        draft_model: DraftModel | None,
    ) -> None:
        self.active: list[Sequence] = []
        self.suspended: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.warm = WarmPrefixes(warm_sequences if shares else 0)
        self.stored = StoredPrefixes(stored_bytes)
        self.cells = Cells(context.cells)
        self.failures: list[Failure] = []
        self._context = context
        self._counters = counters
        self._chooser = chooser
        self._slots = slots
        self._shares = shares
        # What was computed for a draft in vain is cut off again, which only such models allow.
        self._speculation = speculation if shares and speculation.draft > 0 else None
        self.draft_model = draft_model if self._speculation is not None else None
        self._numbers = list(range(slots + warm_sequences))
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.size

    @property
    def size(self) -> int:
        """How many sequences are here, running or not."""
        return len(self.active) + len(self.waiting) + len(self.suspended)

    def ahead(self) -> tuple[int, int]:
        """Return how many answers go on in the next step, and how many tokens of prompts are to be read in."""
        decoding = sum(1 for sequence in self.active if sequence.pending is not None)
        reading = [s for s in (*self.active, *self.waiting) if s.pending is None]
        return decoding, sum(len(sequence.prompt) - sequence.computed for sequence in reading)

    def enqueue(self, submit: Submit) -> None:
        """Let a request wait for its turn."""
        self._counters.requests += 1
        prompt = unpack_tokens(submit.prompt)
        leader: Sequence | None = None
        for choice in range(submit.choices):
            sequence = Sequence(submit, prompt, choice=choice, arrival=self._arrivals, leader=leader)
            self.waiting.append(sequence)
            leader = leader or sequence
        self._arrivals += 1

    def drop(self, request: int) -> bool:
        """Take a request out, wherever it is; False when it is not here."""
        gone = [s for s in (*self.active, *self.suspended, *self.waiting) if s.submit.request == request]
        for sequence in gone:
            self.leave(sequence)
        self.waiting = deque(s for s in self.waiting if s.submit.request != request)
        return bool(gone)

    def start_waiting(self) -> None:
        """Let sequences begin or come back as long as there are slots and cells; nobody is overtaken."""
        while self.suspended and len(self.active) < self._slots:
            sequence = self.suspended[room.comes_back([s.claim for s in self.suspended])]
            if not self._resume(sequence):
                return
        if self.suspended:
            return
        held: list[Sequence] = []
        while self.waiting and len(self.active) < self._slots:
            sequence = self.waiting.popleft()
            if _needs_its_leader(sequence):
                held.append(sequence)
            elif not self._begin(sequence):
                held.append(sequence)
                break
        self.waiting.extendleft(reversed(held))

    def make_room(self, tokens: int) -> bool:
        """Drop warm prefixes, oldest first, until `tokens` cells are free; False when that is not enough."""
        while self.cells.free < tokens and len(self.warm):
            self._store_oldest()
        return self.cells.free >= tokens

    def suspend_one(self) -> None:
        """Move the sequence that gives way to host memory."""
        sequence = self.active[room.gives_way([s.claim for s in self.active])]
        self.active.remove(sequence)
        sequence.saved = self._context.save(sequence.cells) if sequence.computed else b""
        self._forget(sequence.cells)
        sequence.cells = NO_CELLS
        self.suspended.append(sequence)
        self._counters.preemptions += 1

    def free_something(self) -> None:
        """Make room although by our count there is some: llama.cpp knows better. Raises LlamaError when nothing is left."""
        if len(self.warm):
            self._store_oldest()
        elif len(self.active) > 1:
            self.suspend_one()
        else:
            raise LlamaError(f"a lone sequence does not fit into {self.cells.capacity} cells")

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Note that a step has computed tokens of a sequence."""
        sequence.computed += tokens
        self.cells.extend(sequence.cells, tokens)

    def retract(self, sequence: Sequence, tokens: int) -> None:
        """Take back the last computed tokens of a sequence."""
        sequence.computed -= tokens
        self.cells.cut(sequence.cells, sequence.computed)
        self._context.cut(sequence.cells, sequence.computed)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out, however far it got; what it computed stays warm if it may."""
        if sequence in self.active:
            self.active.remove(sequence)
        if sequence in self.suspended:
            self.suspended.remove(sequence)
        if sequence.chooser is not None:
            sequence.chooser.close()
            sequence.chooser = None
        if self.draft_model is not None and sequence.drafter is not None and sequence.drafter.reader is not None:
            self.draft_model.leave(sequence.drafter.reader)
        sequence.saved = None
        if sequence.cells == NO_CELLS:
            return
        number, sequence.cells = sequence.cells, NO_CELLS
        if sequence.submit.reuse and sequence.computed >= LEAST_SHARED:
            for each in self.warm.keep(number, sequence.computed_tokens(), sequence.submit.adapters):
                self._forget(each)
            while self.warm.too_many:
                self._store_oldest()
        else:
            self._forget(number)

    def fail(self, sequence: Sequence, why: str, field: str) -> None:
        """End a request that cannot go on."""
        self.drop(sequence.submit.request)
        self.failures.append(Failure(sequence.submit.request, "invalid_request", f"'{field}': {why}", field))

    def forget_warm(self) -> None:
        """Drop every warm prefix."""
        while len(self.warm):
            self._forget(self.warm.drop_oldest()[0].sequence)

    def _begin(self, sequence: Sequence) -> bool:
        """Give a sequence its number, its warm beginning and its chooser; False when there is no room now."""
        number = self._take_number()
        least = 1 if sequence.leader is not None else LEAST_SHARED
        # Who tells of its prompt needs the outputs of all of it.
        reads_all = sequence.told is not None
        match = None if reads_all else longest_match(sequence.prompt, self._sources(sequence), least=least)
        if match is not None:
            self._context.share(match.sequence, number, match.length)
            self.cells.share(match.sequence, number, match.length)
            self.warm.touch(match.sequence)
            sequence.computed = match.length
        if sequence.submit.reuse and not reads_all:
            sequence.computed = self._fetch(sequence.prompt, sequence.submit.adapters, number, held=sequence.computed)
        if not self.make_room(len(sequence.prompt) - sequence.computed + 1) and self.active:
            self._forget(number)
            sequence.computed = 0
            return False
        try:
            sequence.chooser = self._chooser(sequence)
        except LlamaError as error:
            self._forget(number)
            self.fail(
                sequence,
                str(error),
                constraint.field if (constraint := sequence.submit.constraint) is not None else "options.sampling",
            )
            return True
        if sequence.submit.speculate and self._speculation is not None:
            sequence.drafter = Drafter(self._speculation, None if self.draft_model is None else Reader())
        sequence.cells = number
        sequence.cached = sequence.computed
        self._counters.cached_tokens += sequence.computed
        self.active.append(sequence)
        return True

    def _fetch(self, prompt: Tokens, adapters: AdapterSet, number: int, *, held: int) -> int:
        """Replace the `held` tokens of a sequence by a longer beginning from host memory; return how many it holds then."""
        found = self.stored.match(prompt, adapters, least=held + LEAST_SHARED)
        if found is None:
            return held
        stored, length = found
        # All of what is stored comes back before the rest is cut off.
        if not self.make_room(max(len(stored.tokens), len(prompt) + 1)):
            return held
        self._context.cut(number, 0)
        self.cells.cut(number, 0)
        if not self._context.restore(number, stored.state):
            return 0
        self._context.cut(number, length)
        self.cells.extend(number, length)
        return length

    def _store_oldest(self) -> None:
        """Move the oldest warm prefix to host memory, as far as that has room for it."""
        oldest, adapters = self.warm.drop_oldest()
        if self._context.state_bytes(oldest.sequence) <= self.stored.most_bytes:
            self.stored.keep(Stored(oldest.tokens, self._context.save(oldest.sequence), adapters))
        self._forget(oldest.sequence)

    def _resume(self, sequence: Sequence) -> bool:
        margin = RESUME_MARGIN * (len(self.active) + 1)
        if not self.make_room(sequence.computed + margin) and self.active:
            return False
        number = self._take_number()
        if sequence.saved and not self._context.restore(number, sequence.saved):
            self._forget(number)
            if not self.active:
                raise LlamaError(f"a suspended sequence of {sequence.computed} tokens does not fit into an empty cache")
            return False
        self.cells.extend(number, sequence.computed)
        sequence.cells, sequence.saved = number, None
        self.suspended.remove(sequence)
        self.active.append(sequence)
        return True

    def _sources(self, sequence: Sequence) -> Iterable[Source]:
        """Return the sequences whose beginning this one may share, best guess first."""
        if not self._shares:
            return
        if sequence.submit.reuse:
            yield from self.warm.sources(sequence.submit.adapters)
        for other in self.active:
            if other.submit.adapters != sequence.submit.adapters:
                continue  # its cells were computed with other weights
            same_request = other.submit.request == sequence.submit.request
            if same_request or (sequence.submit.reuse and other.submit.reuse):
                yield Source(other.cells, other.prompt[: other.computed])

    def _take_number(self) -> int:
        if not self._numbers:
            self._store_oldest()
        return self._numbers.pop()

    def _forget(self, number: int) -> None:
        """Empty a sequence of the cache and give its number back."""
        self._context.cut(number, 0)
        self.cells.cut(number, 0)
        self._numbers.append(number)


def _needs_its_leader(sequence: Sequence) -> bool:
    """Return whether its prompt is still being computed by the request's first choice."""
    leader = sequence.leader
    return leader is not None and leader.finish is None and (leader.cells == NO_CELLS or leader.prefilling)
