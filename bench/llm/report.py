"""Turn samples into the tables and the result file of `bench.llm.run`; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bench.llm.rounds import CALM_CORES
from bench.measure import Spread, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.llm.rounds import Sample


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Where the time of one decode call goes, milliseconds per call: the whole, inside llama.cpp, everything else."""

    tokens_per_step: float
    whole_ms: float
    decode_ms: float | None

    @property
    def outside_ms(self) -> float | None:
        """Per call, not inside llama.cpp: sampling, batch building, Python, and waiting for the first request."""
        return None if self.decode_ms is None else self.whole_ms - self.decode_ms


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides at one number of streams; pairs are (first side, second side).

    A round is calm when other programs kept less than CALM_CORES busy during both of its halves.
    """

    concurrency: int
    tokens_per_s: tuple[Spread, Spread]
    speed_ratio: Spread
    calm_ratio: Spread | None
    calm_rounds: int
    first_ms: tuple[Spread, Spread]
    first_ratio: Spread
    steps: tuple[StepCost, StepCost]
    cpu_us_per_token: tuple[dict[str, float], dict[str, float]]
    client_us_per_token: tuple[float, float]
    cached_share: tuple[float, float]
    others_cores: float
    same_text_share: float


def progress(sample: Sample) -> str:
    """One line on one burst, for who waits for the tables."""
    return (
        f"{sample.concurrency:>3} streams, round {sample.round_index}, {sample.side}: {sample.tokens_per_s:.1f} tokens/s, "
        f"{sample.steps} calls, others kept {sample.others_cores:.2f} cores busy"
    )


def compare(samples: Sequence[Sample], names: tuple[str, str]) -> list[Comparison]:
    """One comparison per number of streams, in the order measured."""
    concurrencies = dict.fromkeys(sample.concurrency for sample in samples)
    return [_compare(concurrency, *_split(samples, concurrency, names)) for concurrency in concurrencies]


def _split(samples: Sequence[Sample], concurrency: int, names: tuple[str, str]) -> tuple[list[Sample], list[Sample]]:
    chosen = sorted((s for s in samples if s.concurrency == concurrency), key=lambda sample: sample.round_index)
    ours, theirs = ([sample for sample in chosen if sample.side == name] for name in names)
    return ours, theirs


def _compare(concurrency: int, ours: list[Sample], theirs: list[Sample]) -> Comparison:
    sides = (ours, theirs)
    calm = [(a, b) for a, b in zip(ours, theirs, strict=True) if max(a.others_cores, b.others_cores) < CALM_CORES]
    return Comparison(
        concurrency=concurrency,
        tokens_per_s=_pair([spread([s.tokens_per_s for s in side]) for side in sides]),
        speed_ratio=ratio([s.tokens_per_s for s in ours], [s.tokens_per_s for s in theirs]),
        calm_ratio=spread([a.tokens_per_s / b.tokens_per_s for a, b in calm]) if calm else None,
        calm_rounds=len(calm),
        first_ms=_pair([spread([s.first_s * 1e3 for s in side]) for side in sides]),
        first_ratio=ratio([s.first_s for s in ours], [s.first_s for s in theirs]),
        steps=_pair([step_cost(side) for side in sides]),
        cpu_us_per_token=_pair([cpu_per_token(side) for side in sides]),
        client_us_per_token=_pair([1e6 * sum(s.client_cpu_s for s in side) / _tokens(side) for side in sides]),
        cached_share=_pair(
            [sum(s.cached_tokens for s in side) / max(1, sum(s.prompt_tokens for s in side)) for side in sides]
        ),
        others_cores=sum(s.others_cpu_s for side in sides for s in side)
        / sum(s.seconds for side in sides for s in side),
        same_text_share=_same_text(ours, theirs),
    )


def step_cost(samples: Sequence[Sample]) -> StepCost:
    """Cost of a decode call over all samples of one side."""
    steps = max(1, sum(s.steps for s in samples))
    decode = [s.decode_ms for s in samples if s.decode_ms is not None]
    return StepCost(
        tokens_per_step=_tokens(samples) / steps,
        whole_ms=1e3 * sum(s.seconds for s in samples) / steps,
        decode_ms=sum(decode) / steps if len(decode) == len(samples) else None,
    )


def cpu_per_token(samples: Sequence[Sample]) -> dict[str, float]:
    """CPU microseconds per generated token, by part."""
    parts = dict.fromkeys(part for sample in samples for part in sample.cpu_s)
    return {part: 1e6 * sum(s.cpu_s.get(part, 0.0) for s in samples) / _tokens(samples) for part in parts}


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(s.tokens for s in samples)


def _same_text(ours: list[Sample], theirs: list[Sample]) -> float:
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.texts, b.texts, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _pair(both: list[_T]) -> tuple[_T, _T]:
    first, second = both
    return first, second


def tables(comparisons: Sequence[Comparison], names: tuple[str, str]) -> str:
    """Lay the comparisons out for a person."""
    sections = [_speeds(comparisons, names), _step_costs(comparisons, names), _cpu_costs(comparisons, names)]
    return "\n\n".join("\n".join(section) for section in [*sections, _fairness(comparisons)])


def _speeds(comparisons: Sequence[Comparison], names: tuple[str, str]) -> list[str]:
    ours, theirs = names
    rows = [
        (
            "streams",
            f"{ours} tok/s",
            f"{theirs} tok/s",
            "speed ratio",
            "in calm rounds",
            f"{ours} first ms",
            f"{theirs} first ms",
            "first ratio",
        )
    ]
    for c in comparisons:
        speeds = (c.tokens_per_s[0].show(1), c.tokens_per_s[1].show(1), c.speed_ratio.show(3))
        calm = f"{c.calm_ratio.show(3)} of {c.calm_rounds}" if c.calm_ratio else "none was calm"
        firsts = (c.first_ms[0].show(0), c.first_ms[1].show(0), c.first_ratio.show(2))
        rows.append((str(c.concurrency), *speeds, calm, *firsts))
    title = (
        f"tokens/s and first token: median [least-greatest]; ratio = {ours} / {theirs}, median of the per-round ratios"
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [title, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]


def _step_costs(comparisons: Sequence[Comparison], names: tuple[str, str]) -> list[str]:
    lines = ["one decode call, ms: whole = inside llama.cpp + outside it"]
    for c in comparisons:
        lines += [f"{c.concurrency:>7}  {name}: {_step_cost(cost)}" for name, cost in zip(names, c.steps, strict=True)]
    return lines


def _step_cost(cost: StepCost) -> str:
    inside = "not told" if cost.decode_ms is None else f"{cost.decode_ms:.2f} + {cost.outside_ms:.2f}"
    return f"{cost.whole_ms:.2f} = {inside}, {cost.tokens_per_step:.2f} tokens per call"


def _cpu_costs(comparisons: Sequence[Comparison], names: tuple[str, str]) -> list[str]:
    lines = ["CPU microseconds per generated token, by process"]
    for c in comparisons:
        for name, parts, client in zip(names, c.cpu_us_per_token, c.client_us_per_token, strict=True):
            detail = "  ".join(f"{part} {cost:.0f}" for part, cost in parts.items())
            lines.append(
                f"{c.concurrency:>7}  {name}: {sum(parts.values()):.0f} = {detail}  (load client {client:.0f})"
            )
    return lines


def _fairness(comparisons: Sequence[Comparison]) -> list[str]:
    lines = ["is it a fair run?"]
    for c in comparisons:
        warm = f"prompt tokens found warm {c.cached_share[0]:.0%} / {c.cached_share[1]:.0%}"
        rest = f"identical texts {c.same_text_share:.0%}, other programs took {c.others_cores:.2f} cores"
        lines.append(f"{c.concurrency:>7}  {warm}, {rest}")
    return lines


def result(environment: dict[str, Any], comparisons: Sequence[Comparison], samples: Sequence[Sample]) -> dict[str, Any]:
    """Build the content of the result file."""
    return {
        "environment": environment,
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "samples": [{k: v for k, v in asdict(sample).items() if k != "texts"} for sample in samples],
    }
