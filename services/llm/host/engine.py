"""The engine: continuous batching over one llama.cpp context, owned by one thread.

A step computes one token for every running sequence and a share of the prompts that are being read in, in one call of
llama_decode; then every sequence chooses its next token. Commands are taken between steps, so whatever is cancelled is
gone within one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from services.llm.core import governor, patience, planner
from services.llm.core.adapters import AdapterSet, Turns
from services.llm.core.choose import Floats, Likelihood, Scratch, likelihood
from services.llm.core.flush import FlushPolicy
from services.llm.core.patience import Patience
from services.llm.core.wire import Announce, Cancel, Counters, EngineConfig, Probe, Progress, Reading, Step, Submit
from services.llm.host.adapters import Adapters
from services.llm.host.context import ABORTED, NO_ROOM, Batch, Context
from services.llm.host.draft_model import DraftModel
from services.llm.host.grammar import Alphabet, GrammarError
from services.llm.host.llama import Model
from services.llm.host.roster import Roster
from services.llm.host.sampling import Chooser, chooser
from services.llm.host.sequence import Sequence, Spelling
from services.llm.host.step import Row, Share, fill, plan

_WARM_UP_STEPS: Final = 3

Command = Submit | Announce | Cancel | Probe


class Engine:
    """Runs requests on a context. `submit` from any thread; `run` is the engine thread and never returns."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        context: Context,
        send: Callable[[Step], None],
        draft_model: DraftModel | None = None,
    ) -> None:
        self._context = context
        self._vocabulary = model.vocabulary
        self._send = send
        self._spelling = Spelling(model.vocabulary)
        self._ends = model.vocabulary.ends()
        self._end_set = frozenset(self._ends)
        self._suppressed = model.vocabulary.suppressed()
        self._alphabet = Alphabet(model.vocabulary, self._ends)
        self._scratch = Scratch(model.vocabulary.size)
        self._batch = Batch(context.batch_tokens)
        self._adapters = Adapters(model, context, config.loras)
        self._turns = Turns()
        self._counters = Counters(threads=config.threads)
        self._roster = Roster(
            context,
            self._counters,
            self._chooser,
            slots=config.slots,
            warm_sequences=config.warm_sequences,
            shares=model.shares_prefixes,
            speculation=config.speculation,
            stored_bytes=config.stored_prefix_bytes,
            draft_model=draft_model,
        )
        self._limits = planner.StepLimits(
            context.batch_tokens, context.ubatch_tokens, config.stall_s, config.stall_ratio
        )
        self._pace = planner.Pace()
        self._flush = FlushPolicy(config.flush_s)
        self._threads = config.threads
        self._governed = config.govern_threads and config.threads > 1
        self._governor = governor.start(config.threads, time.perf_counter())
        self._slots = config.slots
        self._announced = 0
        self._patience = Patience()
        self._progress: dict[int, Progress] = {}
        self._readings: dict[int, Reading] = {}
        self._finished: list[Sequence] = []
        self._last_flush_s = 0.0
        self._urgent = False
        # Shared with the thread that reads commands.
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._in_step: frozenset[int] = frozenset()
        self._cancelled: set[int] = set()

    # ---- called by the reading thread -------------------------------------------------------------------------

    def tell(self, command: Command) -> None:
        """Queue a command. A step in which nobody else takes part any more is given up at once."""
        if isinstance(command, Cancel):
            with self._lock:
                self._cancelled.add(command.request)
                if self._in_step and self._in_step <= self._cancelled:
                    self._context.set_abort(True)
        self._inbox.append(command)
        self._wake.set()

    # ---- the engine thread ------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds everything in memory.

        How long they take says nothing about threads: the other services are still starting on the same cores.
        """
        for _ in range(_WARM_UP_STEPS):
            self._batch.begin()
            self._batch.add_one(max(self._vocabulary.bos, 0), 0, 0)
            self._context.decode(self._batch)
            self._context.cut(0, 0)

    def run(self) -> None:
        """Work for ever."""
        while True:
            if self._roster.idle and not self._inbox:
                self._wake.wait()
            self._wake.clear()
            self.turn()

    def turn(self) -> None:
        """Take the commands, compute one step if there is anything to compute, and send what is due."""
        self._obey()
        self._gather()
        self._roster.start_waiting()
        self._urgent = self._urgent or bool(self._roster.failures)
        if self._roster.active:
            self._step()
        self._send_due()

    def _gather(self) -> None:
        """Wait a moment for requests that are on their way, if there are some to begin with and there is room for more."""
        while self._announced > 0 and 0 < self._roster.size < self._slots:
            began_s = time.perf_counter()
            decoding, prompt_tokens = self._roster.ahead()
            step_s = self._pace.step_s(decoding=decoding, prompt_tokens=prompt_tokens)
            self._patience = self._patience.at(began_s, patience.most_s(step_s))
            if not self._wake.wait(self._patience.left_s):
                self._patience = self._patience.waited(self._patience.left_s)
                return
            self._wake.clear()
            self._patience = self._patience.waited(time.perf_counter() - began_s)
            self._obey()

    def _obey(self) -> None:
        probed = False
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, Submit):
                self._roster.enqueue(command)
            elif isinstance(command, Cancel):
                self._drop(command.request)
            elif isinstance(command, Announce):
                self._announced += command.requests
            else:
                probed = True
        if probed:  # now, not after a step that may take seconds
            self._urgent = True
            self._send_due()

    def _drop(self, request: int) -> None:
        with self._lock:
            self._cancelled.discard(request)
        if self._roster.drop(request):
            self._counters.cancelled += 1
        self._progress.pop(request, None)
        self._readings.pop(request, None)

    def _chooser(self, sequence: Sequence) -> Chooser:
        return chooser(
            sequence.submit.sampling,
            sequence.limits,
            choice=sequence.choice,
            prompt=sequence.prompt,
            vocabulary=self._vocabulary,
            ends=self._ends,
            suppressed=self._suppressed,
            context=self._context,
            scratch=self._scratch,
            constraint=sequence.submit.constraint,
            shown=sequence.submit.shown,
            alphabet=self._alphabet,
        )

    # ---- a step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        shares = plan(self._roster, self._pace, self._limits, adapters=self._next_adapters())
        if not shares:
            return
        rows = fill(self._batch, shares)
        began_s = time.perf_counter()
        result = self._decode()
        if result == NO_ROOM:
            self._roster.free_something()
            return
        if result == ABORTED:
            for sequence, _, _ in shares:
                self._context.cut(sequence.cells, sequence.computed)
            return
        logits = self._context.logits(sum(row.outputs for row in rows)) if rows else None
        ended_s = time.perf_counter()
        self._account(shares, ended_s - began_s, ended_s)
        if logits is not None:
            self._answer(rows, logits)

    def _next_adapters(self) -> AdapterSet:
        """Return the adapters whose sequences take part in the next step, and let it be computed with them."""
        adapters = self._turns.next({s.submit.adapters for s in self._roster.active}) if self._adapters else ()
        self._adapters.use(adapters)
        return adapters

    def _decode(self) -> int:
        with self._lock:
            self._in_step = frozenset(s.submit.request for s in self._roster.active)
            self._context.set_abort(self._in_step <= self._cancelled)
        try:
            return self._context.decode(self._batch)
        finally:
            with self._lock:
                self._in_step = frozenset()

    def _account(self, shares: list[Share], seconds: float, now_s: float) -> None:
        decoded = prefilled = 0
        for sequence, count, draft in shares:
            self._roster.computed(sequence, count + len(draft))
            if sequence.pending is not None:
                decoded += 1 + len(draft)
                continue
            prefilled += count
            if sequence.prefilling and sequence.choice == 0:
                request = sequence.submit.request
                self._progress[request] = Progress(request, sequence.computed, len(sequence.prompt))
        self._pace = self._pace.seen(decoded=decoded, prefilled=prefilled, seconds=seconds)
        counters = self._counters
        counters.steps += 1
        counters.decode_us += int(seconds * 1e6)
        counters.prefill_tokens += prefilled
        if self._governed and prefilled == 0:
            self._governor = governor.observe(self._governor, tokens=decoded, seconds=seconds, now_s=now_s)
            self._context.set_threads(self._governor.threads)

    def _answer(self, rows: list[Row], logits: Floats) -> None:
        """Let every sequence go on as far as its outputs reach."""
        first = 0
        least_kept = min(len(row.draft) for row in rows)
        for row in rows:
            answers = logits[first + row.told : first + row.outputs]
            if row.sequence.told is not None:
                self._tell(row, logits[first : first + row.told])
            first += row.outputs
            if not row.answers:
                continue
            least_kept = min(least_kept, self._follow(row, answers))
            if row.sequence.finish is not None:
                self._finished.append(row.sequence)
                self._roster.leave(row.sequence)
        if least_kept:
            self._saved(least_kept, rows)

    def _tell(self, row: Row, logits: Floats) -> None:
        """Note how likely the prompt's tokens are that come after those outputs, and send it when it is known of all."""
        sequence = row.sequence
        assert sequence.told is not None  # noqa: S101 - only such have outputs for it
        if not sequence.told:
            sequence.tell(self._spelling, None)
        best = max(sequence.submit.logprobs, 0)
        for output in logits:
            token = int(sequence.prompt[len(sequence.told)])
            sequence.tell(self._spelling, likelihood(output, self._scratch, token=token, best=best))
        if row.answers:
            request = sequence.submit.request
            self._readings[request] = Reading(request, tuple(sequence.told))
            sequence.told = None
            self._urgent = True

    def _saved(self, calls: int, rows: list[Row]) -> None:
        """Count calls that were not needed. They are the draft model's when an answer with fewest tokens kept was its."""
        self._counters.calls_saved += calls
        drafters = (row.sequence.drafter for row in rows)
        if any(each is not None and each.is_by_model and each.kept == calls for each in drafters):
            self._counters.model_calls_saved += calls

    def _follow(self, row: Row, logits: Floats) -> int:
        """Choose the next token, and those after it as long as the draft agrees. Returns how much of the draft was kept."""
        sequence, draft, drafter = row.sequence, row.draft, row.sequence.drafter
        if sequence.limits.max_tokens == 0:
            sequence.end_unanswered()
            self._urgent = True
            return 0
        if drafter is None:
            self._choose(sequence, logits[0], row.entry)
            return 0
        drafter.begin(draft)
        for ahead in range(len(draft) + 1):
            if not self._choose(sequence, logits[ahead], row.entry + ahead) or sequence.finish is not None:
                break
        kept = drafter.learn(answered=len(sequence.generated))
        if sequence.chooser is None:
            return kept  # it has failed, and nothing of it is left
        self._counters.drafted += len(draft)
        self._counters.accepted += kept
        if drafter.is_by_model:
            self._counters.model_drafted += len(draft)
            self._counters.model_accepted += kept
        if kept < len(draft):
            self._roster.retract(sequence, len(draft) - kept)
        return kept

    def _choose(self, sequence: Sequence, logits: Floats, entry: int) -> bool:
        """Let a sequence choose its next token and take it. Returns whether it is the one that a draft foretold."""
        if sequence.chooser is None:
            return False  # another choice of its request may just have failed
        found: Likelihood | None = None
        raw = logits.copy() if sequence.wants_likelihood else None  # a chooser may overwrite them
        try:
            token = sequence.chooser.choose(logits, entry)
        except GrammarError as error:
            assert sequence.submit.constraint is not None  # noqa: S101 - nothing else has a grammar
            self._roster.fail(sequence, str(error), sequence.submit.constraint.field)
            return False
        if raw is not None:
            found = likelihood(raw, self._scratch, token=token, best=max(sequence.submit.logprobs, 0))
        foretold = sequence.drafter is not None and sequence.drafter.compare(token)
        self._counters.decode_tokens += 1
        if sequence.take(token, self._spelling, ends=token in self._end_set, likelihood=found):
            self._urgent = True
        return foretold

    # ---- telling ----------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        now_s = time.perf_counter()
        if not self._flush.due(now_s=now_s, last_s=self._last_flush_s, urgent=self._urgent):
            return
        deltas = [delta for s in (*self._roster.active, *self._finished) if (delta := s.delta()) is not None]
        if not (deltas or self._progress or self._roster.failures or self._urgent):
            return
        counters = self._counters
        counters.active = len(self._roster.active)
        counters.waiting = len(self._roster.waiting)
        counters.suspended = len(self._roster.suspended)
        counters.kv_used = self._roster.cells.used
        counters.warm = len(self._roster.warm)
        counters.stored_bytes = self._roster.stored.used_bytes
        counters.threads = self._context.threads
        if self._roster.draft_model is not None:
            counters.draft_calls = self._roster.draft_model.calls
        readings = list(self._readings.values())
        self._send(Step(counters, deltas, list(self._progress.values()), self._roster.failures, readings))
        self._progress.clear()
        self._readings.clear()
        self._roster.failures = []
        self._finished.clear()
        self._urgent = False
        self._last_flush_s = now_s
