"""Interleaved rounds: the same burst to both sides in turn, with the CPU time of every process around each."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.measure import abba
from bench.processes import cpu_seconds, machine_busy_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.llm.load import BurstResult, LoadProcess
    from bench.llm.sides import Side

# A server publishes the counters of a step shortly after the step's tokens.
PUBLISHED_S = 0.05
# Fewer cores kept busy by other programs count as calm.
CALM_CORES = 0.15
LOOK_S = 0.5


class BenchError(Exception):
    """The two sides did not do the same work, so nothing can be compared."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One burst at one side."""

    side: str
    concurrency: int
    round_index: int
    seconds: float
    tokens: int
    first_s: float
    events: int
    prompt_tokens: int
    cached_tokens: int
    steps: int
    decode_ms: float | None
    cpu_s: Mapping[str, float]
    client_cpu_s: float
    others_cpu_s: float
    texts: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all streams by the time from the burst's start to the end of its last stream."""
        return self.tokens / self.seconds

    @property
    def others_cores(self) -> float:
        """Cores that programs outside this bench kept busy meanwhile."""
        return self.others_cpu_s / self.seconds


def prompts(concurrency: int, round_index: int) -> list[str]:
    """User turns that differ from the first word on, so that no side finds a warm prefix beyond the template's own."""
    return [
        f"{round_index * concurrency + index} dogs and {index + 2} cats live in the old city. Tell their story in many chapters."
        for index in range(concurrency)
    ]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked: tokens of every stream, and seconds after which a burst is given up.

    `calm_limit_s`: longest wait before a round for other programs to leave the machine alone.
    """

    tokens: int
    limit_s: float = 120.0
    calm_limit_s: float = 0.0


def run_rounds(
    load: LoadProcess, sides: tuple[Side, Side], plan: Plan, *, concurrency: int, rounds: range
) -> Iterator[Sample]:
    """Measure both sides in turn, with the same prompts in each round; BenchError when they did unequal work."""
    for round_index in rounds:
        wait_for_calm(plan.calm_limit_s)
        for which in abba(round_index):
            yield measure(load, sides[which], plan, concurrency=concurrency, round_index=round_index)


def wait_for_calm(limit_s: float) -> None:
    """Wait until the machine is idle, but no longer than the limit; what is measured is measured in any case."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        before_s = machine_busy_seconds()
        time.sleep(LOOK_S)
        if machine_busy_seconds() - before_s < CALM_CORES * LOOK_S:
            return


def measure(load: LoadProcess, side: Side, plan: Plan, *, concurrency: int, round_index: int) -> Sample:
    """One burst at one side."""
    bodies = [side.body(prompt, plan.tokens) for prompt in prompts(concurrency, round_index)]
    counted, processes = side.counters(), side.processes()
    cpu_before, busy_before = _cpu(processes), machine_busy_seconds()
    result = load.burst(port=side.port, path="/v1/chat/completions", bodies=bodies, limit_s=plan.limit_s)
    cpu_after, busy_after = _cpu(processes), machine_busy_seconds()
    if complaint := result.complaint(plan.tokens):
        raise BenchError(f"{side.name}, {concurrency} streams: {complaint}")
    time.sleep(PUBLISHED_S)
    counted = side.counters().since(counted)
    cpu_s = {part: cpu_after[part] - cpu_before[part] for part in processes}
    return Sample(
        side=side.name,
        concurrency=concurrency,
        round_index=round_index,
        seconds=result.seconds,
        tokens=result.tokens,
        first_s=statistics.median(result.first_s),
        events=sum(stream.answer.events for stream in result.streams),
        prompt_tokens=_total(result, "prompt_tokens"),
        cached_tokens=_total(result, "cached_tokens"),
        steps=counted.steps,
        decode_ms=counted.decode_ms,
        cpu_s=cpu_s,
        client_cpu_s=result.client_cpu_s,
        others_cpu_s=max(0.0, busy_after - busy_before - sum(cpu_s.values()) - result.client_cpu_s),
        texts=tuple(stream.answer.text for stream in result.streams),
    )


def _total(result: BurstResult, count: str) -> int:
    return sum(getattr(stream.answer, count) or 0 for stream in result.streams)


def _cpu(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {part: sum(cpu_seconds(pid) for pid in pids) for part, pids in processes.items()}
