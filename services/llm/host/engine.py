"""The engine: continuous batching over one llama.cpp context, owned by one thread.

A step computes one token for every running sequence and a share of the prompts that are being read in, in one call of
llama_decode; then every sequence chooses its next token. Commands are taken between steps, so whatever is cancelled is
gone within one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from services.llm.core import governor, planner, room
from services.llm.core.cells import Cells
from services.llm.core.choose import Floats, Likelihood, Scratch, likelihood
from services.llm.core.flush import FlushPolicy
from services.llm.core.prefix import Source, WarmPrefixes, longest_match
from services.llm.core.wire import Cancel, Counters, EngineConfig, Failure, Probe, Progress, Step, Submit, unpack_tokens
from services.llm.host.llama import ABORTED, NO_ROOM, Batch, Context, LlamaError, Model
from services.llm.host.sampling import chooser
from services.llm.host.sequence import NO_CELLS, Sequence, Spelling

LEAST_SHARED: Final = 16
"""Shorter beginnings are computed again: looking after them costs more."""

_WARM_UP_STEPS: Final = 3
RESUME_MARGIN: Final = 32
"""Free cells per sequence before a suspended one comes back, so that it is not sent away again at once."""

Command = Submit | Cancel | Probe


class Engine:
    """Runs requests on a context. `submit` from any thread; `run` is the engine thread and never returns."""

    def __init__(self, config: EngineConfig, model: Model, context: Context, send: Callable[[Step], None]) -> None:
        self._context = context
        self._vocabulary = model.vocabulary
        self._send = send
        self._spelling = Spelling(model.vocabulary)
        self._ends = model.vocabulary.ends()
        self._end_set = frozenset(self._ends)
        self._suppressed = model.vocabulary.suppressed()
        self._scratch = Scratch(model.vocabulary.size)
        self._batch = Batch(config.batch_tokens)
        self._slots = config.slots
        warm = config.warm_sequences if model.shares_prefixes else 0
        self._shares = model.shares_prefixes
        self._warm = WarmPrefixes(warm)
        self._cells = Cells(context.cells)
        self._numbers = list(range(config.slots + config.warm_sequences))
        self._limits = planner.StepLimits(config.batch_tokens, config.stall_s, config.stall_ratio)
        self._pace = planner.Pace()
        self._flush = FlushPolicy(config.flush_s)
        self._threads = config.threads
        self._governed = config.govern_threads and config.threads > 1
        self._governor = governor.start(config.threads, time.perf_counter())
        self._counters = Counters(threads=config.threads)
        self._arrivals = 0
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._suspended: list[Sequence] = []
        self._progress: dict[int, Progress] = {}
        self._failures: list[Failure] = []
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
        self._inbox.append(command)
        if isinstance(command, Cancel):
            with self._lock:
                self._cancelled.add(command.request)
                if self._in_step and self._in_step <= self._cancelled:
                    self._context.set_abort(True)
        self._wake.set()

    # ---- the engine thread ------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds everything in memory and threads are chosen."""
        measured_s = {}
        for threads in governor.candidates(self._threads) if self._governed else [self._threads]:
            self._context.set_threads(threads)
            measured_s[threads] = min(self._warm_up_step() for _ in range(_WARM_UP_STEPS))
        self._governor = governor.start(self._threads, time.perf_counter(), measured_s=measured_s)
        self._context.set_threads(self._governor.threads)

    def _warm_up_step(self) -> float:
        self._batch.begin()
        self._batch.add_one(max(self._vocabulary.bos, 0), 0, 0)
        began_s = time.perf_counter()
        self._context.decode(self._batch)
        seconds = time.perf_counter() - began_s
        self._context.cut(0, 0)
        return seconds

    def run(self) -> None:
        """Work for ever."""
        while True:
            if not self._active and not self._waiting and not self._suspended and not self._inbox:
                self._wake.wait()
            self._wake.clear()
            self.turn()

    def turn(self) -> None:
        """Take the commands, compute one step if there is anything to compute, and send what is due."""
        self._obey()
        self._start_waiting()
        if self._active:
            self._step()
        self._send_due()

    def _obey(self) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, Submit):
                self._enqueue(command)
            elif isinstance(command, Cancel):
                self._drop(command.request)
            else:
                self._urgent = True

    def _enqueue(self, submit: Submit) -> None:
        self._counters.requests += 1
        prompt = unpack_tokens(submit.prompt)
        leader: Sequence | None = None
        for choice in range(submit.choices):
            sequence = Sequence(submit, prompt, choice=choice, arrival=self._arrivals, leader=leader)
            self._waiting.append(sequence)
            leader = leader or sequence
        self._arrivals += 1

    def _drop(self, request: int) -> None:
        with self._lock:
            self._cancelled.discard(request)
        gone = [s for s in (*self._active, *self._suspended, *self._waiting) if s.submit.request == request]
        for sequence in gone:
            self._leave(sequence)
        self._waiting = deque(s for s in self._waiting if s.submit.request != request)
        self._progress.pop(request, None)
        if gone:
            self._counters.cancelled += 1

    # ---- who runs ---------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        while self._suspended and len(self._active) < self._slots:
            sequence = self._suspended[room.comes_back([s.claim for s in self._suspended])]
            if not self._resume(sequence):
                return  # whoever came later does not overtake it
        if self._suspended:
            return
        held: list[Sequence] = []
        while self._waiting and len(self._active) < self._slots:
            sequence = self._waiting.popleft()
            leader = sequence.leader
            if leader is not None and leader.finish is None and (leader.cells == NO_CELLS or leader.prefilling):
                held.append(sequence)  # its prompt is being computed by the request's first choice
            elif not self._begin(sequence):
                held.append(sequence)
                break
        self._waiting.extendleft(reversed(held))

    def _begin(self, sequence: Sequence) -> bool:
        """Give a sequence its number, its warm beginning and its chooser; False when there is no room now."""
        number = self._take_number()
        match = longest_match(sequence.prompt, self._sources(sequence), least=self._least(sequence))
        if match is not None:
            self._context.share(match.sequence, number, match.length)
            self._cells.share(match.sequence, number, match.length)
            self._warm.touch(match.sequence)
            sequence.computed = match.length
        if not self._make_room(len(sequence.prompt) - sequence.computed + 1) and self._active:
            self._forget(number)
            sequence.computed = 0
            return False
        try:
            sequence.chooser = chooser(
                sequence.submit.sampling,
                sequence.limits,
                choice=sequence.choice,
                prompt=sequence.prompt,
                vocabulary=self._vocabulary,
                ends=self._ends,
                suppressed=self._suppressed,
                context=self._context,
                scratch=self._scratch,
            )
        except LlamaError as error:
            self._forget(number)
            self._fail(sequence, str(error))
            return True
        sequence.cells = number
        sequence.cached = sequence.computed
        self._counters.cached_tokens += sequence.computed
        self._active.append(sequence)
        return True

    def _fail(self, sequence: Sequence, message: str) -> None:
        request = sequence.submit.request
        self._drop(request)
        self._failures.append(Failure(request, "invalid_request", message, "options.sampling"))
        self._urgent = True

    def _least(self, sequence: Sequence) -> int:
        return 1 if sequence.leader is not None else LEAST_SHARED

    def _sources(self, sequence: Sequence) -> Iterable[Source]:
        """Return the sequences whose beginning this one may share, best guess first."""
        if not self._shares:
            return
        if sequence.submit.reuse:
            yield from self._warm.sources()
        for other in self._active:
            same_request = other.submit.request == sequence.submit.request
            if same_request or (sequence.submit.reuse and other.submit.reuse):
                yield Source(other.cells, other.prompt[: other.computed])

    def _take_number(self) -> int:
        if not self._numbers:
            self._forget(self._warm.drop_oldest())
        return self._numbers.pop()

    def _forget(self, number: int) -> None:
        """Empty a sequence of the cache and give its number back."""
        self._context.cut(number, 0)
        self._cells.cut(number, 0)
        self._numbers.append(number)

    def _make_room(self, tokens: int) -> bool:
        """Drop warm prefixes, oldest first, until `tokens` cells are free; False when that is not enough."""
        while self._cells.free < tokens and len(self._warm):
            self._forget(self._warm.drop_oldest())
        return self._cells.free >= tokens

    def _suspend_one(self) -> None:
        """Move the sequence that gives way to host memory."""
        sequence = self._active[room.gives_way([s.claim for s in self._active])]
        self._active.remove(sequence)
        sequence.saved = self._context.save(sequence.cells) if sequence.computed else b""
        self._forget(sequence.cells)
        sequence.cells = NO_CELLS
        self._suspended.append(sequence)
        self._counters.preemptions += 1

    def _resume(self, sequence: Sequence) -> bool:
        margin = RESUME_MARGIN * (len(self._active) + 1)
        if not self._make_room(sequence.computed + margin) and self._active:
            return False
        number = self._take_number()
        if sequence.saved and not self._context.restore(number, sequence.saved):
            self._forget(number)
            if not self._active:
                raise LlamaError(f"a suspended sequence of {sequence.computed} tokens does not fit into an empty cache")
            return False
        self._cells.extend(number, sequence.computed)
        sequence.cells, sequence.saved = number, None
        self._suspended.remove(sequence)
        self._active.append(sequence)
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out, however far it got; what it computed stays warm if it may."""
        if sequence in self._active:
            self._active.remove(sequence)
        if sequence in self._suspended:
            self._suspended.remove(sequence)
        if sequence.chooser is not None:
            sequence.chooser.close()
            sequence.chooser = None
        sequence.saved = None
        if sequence.cells == NO_CELLS:
            return
        number, sequence.cells = sequence.cells, NO_CELLS
        if sequence.submit.reuse and sequence.computed >= LEAST_SHARED:
            for each in self._warm.keep(number, sequence.computed_tokens()):
                self._forget(each)
        else:
            self._forget(number)

    # ---- a step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        chunks = self._plan()
        if not chunks:
            return
        rows = self._fill(chunks)
        began_s = time.perf_counter()
        result = self._decode()
        if result == NO_ROOM:
            self._free_something()
            return
        if result == ABORTED:
            for sequence, _ in chunks:
                self._context.cut(sequence.cells, sequence.computed)
            return
        logits = self._context.logits(len(rows)) if rows else None
        ended_s = time.perf_counter()
        self._account(chunks, ended_s - began_s, ended_s)
        if logits is not None:
            for row, (sequence, entry) in enumerate(rows):
                self._choose(sequence, logits[row], entry)

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Return how many tokens of whom go into the step; makes room for them first."""
        while True:
            decoding = [s for s in self._active if s.pending is not None]
            if self._make_room(len(decoding)):
                break
            self._suspend_one()
        prefilling = [s for s in self._active if s.pending is None]
        chunks = [(sequence, 1) for sequence in decoding]
        if not prefilling:
            return chunks
        remaining = [len(s.prompt) - s.computed for s in prefilling]
        budget = planner.prefill_budget(self._pace, self._limits, decoding=len(decoding))
        wanted = min(budget, sum(remaining))
        self._make_room(len(decoding) + wanted)
        budget = min(budget, self._cells.free - len(decoding))
        if budget <= 0 and not decoding:
            self._suspend_one()
            return []
        shares = planner.share_prefill(remaining, budget)
        chunks += [(sequence, share) for sequence, share in zip(prefilling, shares, strict=True) if share]
        return chunks

    def _fill(self, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Write the batch; return whose output is wanted, with the entry it is at."""
        batch = self._batch
        batch.begin()
        rows: list[tuple[Sequence, int]] = []
        for sequence, count in chunks:
            at = sequence.computed
            if sequence.pending is not None:
                batch.add_one(sequence.pending, at, sequence.cells)
                rows.append((sequence, batch.size - 1))
                continue
            last = at + count == len(sequence.prompt)
            batch.add_chunk(sequence.prompt[at : at + count], at, sequence.cells, output=last)
            if last:
                rows.append((sequence, batch.size - 1))
        return rows

    def _decode(self) -> int:
        with self._lock:
            self._in_step = frozenset(s.submit.request for s in self._active)
            self._context.set_abort(self._in_step <= self._cancelled)
        try:
            return self._context.decode(self._batch)
        finally:
            with self._lock:
                self._in_step = frozenset()

    def _free_something(self) -> None:
        """Make room although by our count there is some: llama.cpp knows better."""
        if len(self._warm):
            self._forget(self._warm.drop_oldest())
        elif len(self._active) > 1:
            self._suspend_one()
        else:
            raise LlamaError(
                f"{self._batch.size} tokens of a lone sequence do not fit into {self._cells.capacity} cells"
            )

    def _account(self, chunks: list[tuple[Sequence, int]], seconds: float, now_s: float) -> None:
        decoded = prefilled = 0
        for sequence, count in chunks:
            sequence.computed += count
            self._cells.extend(sequence.cells, count)
            if sequence.pending is not None:
                decoded += 1
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

    def _choose(self, sequence: Sequence, logits: Floats, entry: int) -> None:
        found: Likelihood | None = None
        assert sequence.chooser is not None  # noqa: S101 - every active sequence has one
        if sequence.wants_likelihood:
            raw = logits.copy()  # a chooser may overwrite them
            token = sequence.chooser.choose(logits, entry)
            found = likelihood(raw, self._scratch, token=token, best=max(sequence.submit.logprobs, 0))
        else:
            token = sequence.chooser.choose(logits, entry)
        self._counters.decode_tokens += 1
        news = sequence.take(token, self._spelling, ends=token in self._end_set, likelihood=found)
        if news:
            self._urgent = True
        if sequence.finish is not None:
            self._finished.append(sequence)
            self._leave(sequence)

    # ---- telling ----------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        now_s = time.perf_counter()
        if not self._flush.due(now_s=now_s, last_s=self._last_flush_s, urgent=self._urgent):
            return
        deltas = [delta for s in (*self._active, *self._finished) if (delta := s.delta()) is not None]
        if not (deltas or self._progress or self._failures or self._urgent):
            return
        counters = self._counters
        counters.active = len(self._active)
        counters.waiting = len(self._waiting)
        counters.suspended = len(self._suspended)
        counters.kv_used = self._cells.used
        counters.warm = len(self._warm)
        counters.threads = self._context.threads
        self._send(Step(counters, deltas, list(self._progress.values()), self._failures))
        self._progress.clear()
        self._failures = []
        self._finished.clear()
        self._urgent = False
        self._last_flush_s = now_s
