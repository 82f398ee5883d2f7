"""The thread that computes embeddings: steps of whole inputs of several requests, a turn each."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.llm.core.embed_plan import StepRoom, share_step
from services.llm.core.embed_wire import Computed, EmbedCounters, Part
from services.llm.host.context import Tokens
from services.llm.host.embed_context import EmbedContext


@dataclass(slots=True)
class Job:
    """A request: what of it still waits."""

    request: int
    waiting: deque[Tokens]
    lengths: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.lengths.extend(len(tokens) for tokens in self.waiting)


class EmbedEngine:
    """Computes jobs until the process ends. `tell` and `drop` may be called from another thread."""

    def __init__(self, context: EmbedContext, room: StepRoom, send: Callable[[Computed], None]) -> None:
        self._context = context
        self._room = room
        self._send = send
        self._news: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()  # who waits longest for a turn comes first
        self._lock = threading.Lock()
        self._in_step: set[int] = set()
        self._counters = EmbedCounters()

    def tell(self, job: Job) -> None:
        """Take a job on."""
        self._news.put(job)

    def drop(self, request: int) -> None:
        """Forget a job; a step that computes for nobody else is given up in the middle."""
        self._news.put(request)
        with self._lock:
            self._in_step.discard(request)
            if not self._in_step:
                self._context.set_abort(True)

    def ask(self) -> None:
        """Send the counters between two steps."""
        self._news.put(None)

    def run(self) -> None:
        """Compute for ever."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what was told meanwhile, and compute one step if there is anything to compute."""
        self._take_news()
        if self._jobs:
            self._step()

    def _take_news(self) -> None:
        """Take what was told meanwhile; wait for it when there is nothing to compute."""
        while not self._jobs or not self._news.empty():
            news = self._news.get()
            if news is None:
                self._report([])
            elif isinstance(news, Job):
                self._counters.requests += 1
                self._jobs.append(news)
            else:
                kept = deque(job for job in self._jobs if job.request != news)
                self._counters.cancelled += len(self._jobs) - len(kept)
                self._jobs = kept

    def _step(self) -> None:
        taken = share_step([job.lengths for job in self._jobs], self._room)
        turns = [(job, count) for job, count in zip(self._jobs, taken, strict=True) if count]
        inputs = [job.waiting[place] for job, count in turns for place in range(count)]
        vectors = self._compute({job.request for job, _ in turns}, inputs)
        if vectors is None:
            return
        parts = []
        at = 0
        for job, count in turns:
            parts.append(Part(job.request, b"".join(vectors[at : at + count])))
            at += count
            for _ in range(count):
                job.waiting.popleft()
                job.lengths.popleft()
        served = {job.request for job, _ in turns}
        passed_over = [job for job in self._jobs if job.request not in served]
        self._jobs = deque([*passed_over, *(job for job, _ in turns if job.waiting)])
        self._report(parts)

    def _compute(self, requests: set[int], inputs: list[Tokens]) -> list[bytes] | None:
        with self._lock:
            self._in_step = requests
            self._context.set_abort(False)
        began_s = time.perf_counter()
        vectors = self._context.compute(inputs)
        counters = self._counters
        counters.compute_us += int((time.perf_counter() - began_s) * 1e6)
        counters.steps += 1
        if vectors is not None:
            counters.inputs += len(inputs)
            counters.tokens += sum(len(tokens) for tokens in inputs)
        return vectors

    def _report(self, parts: list[Part]) -> None:
        self._counters.active = len(self._jobs)
        self._counters.waiting = sum(len(job.waiting) for job in self._jobs)
        self._send(Computed(self._counters, parts))
