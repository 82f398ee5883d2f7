"""What the bursts of bench.transport say, as the lines that are printed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bench.measure import Spread, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Name(StrEnum):
    """The sides."""

    DIRECT = "no proxy"
    PLAIN = "plain Envoy"
    GATED = "gated"
    KEYED = "gated, keys"
    LITELLM = "LiteLLM"
    RELAY = "Python relay"


GOALS: Mapping[Name, float] = {Name.GATED: 0.14, Name.KEYED: 0.10}
"""Asked of plain Envoy's requests/s, at 32 connections."""
LITELLM_GOAL = 5.0
"""Asked of LiteLLM's requests/s."""
ADDED_GOAL_US = 1_500
"""Asked of the added p50 at one connection."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What one run of the load generator saw, and the CPU seconds of the generator, the proxy and admission meanwhile."""

    requests: int
    seconds: float
    load_s: float
    p50_us: int
    p99_us: int
    proxy_s: float
    admission_s: float

    @property
    def per_second(self) -> float:
        """Requests answered per second."""
        return self.requests / self.seconds


def read_burst(line: str, *, proxy_s: float, admission_s: float) -> Burst:
    """Return what the load generator's line says. Raises RuntimeError when an answer was not 200, or there was none."""
    answers, bad, took, spent, p50, _, p99 = line.split()
    if int(bad) or not int(answers):
        raise RuntimeError(f"{bad} of {answers} answers were not 200")
    return Burst(int(answers), float(took), float(spent), int(p50), int(p99), proxy_s, admission_s)


def table(bursts: Mapping[Name, Sequence[Burst]]) -> list[str]:
    """Return a line for each side."""
    heads = ("requests/s", "p50 us", "p99 us", "proxy's CPU us", "admission's CPU us", "load's share of a core")
    widths = (22, 21, 22, 20, 20, 0)
    lines = ["".join(head.ljust(width) for head, width in zip(("side", *heads), (14, *widths), strict=True))]
    for name, each in bursts.items():
        cells = (
            name.value,
            _of(each, lambda burst: burst.per_second).show(0),
            _of(each, lambda burst: burst.p50_us).show(0),
            _of(each, lambda burst: burst.p99_us).show(0),
            _of(each, lambda burst: burst.proxy_s / burst.requests * 1e6).show(0),
            _of(each, lambda burst: burst.admission_s / burst.requests * 1e6).show(0),
            _of(each, lambda burst: burst.load_s / burst.seconds).show(2),
        )
        lines.append("".join(cell.ljust(width) for cell, width in zip(cells, (14, *widths), strict=True)))
    return lines


def ratios(bursts: Mapping[Name, Sequence[Burst]]) -> list[str]:
    """Return every ratio that is asked for, at many connections."""
    lines = []
    for name in bursts:
        if name not in {Name.DIRECT, Name.PLAIN}:
            goal = f" (goal {GOALS[name]:.2f})" if name in GOALS else ""
            lines.append(f"{name.value} over plain Envoy: {_rates(bursts, name, Name.PLAIN).show(3)}{goal}")
    if Name.LITELLM in bursts:
        for name in (Name.GATED, Name.KEYED):
            times = _rates(bursts, name, Name.LITELLM).show(1)
            lines.append(f"{name.value} over LiteLLM: {times} times (goal more than {LITELLM_GOAL:g})")
    return lines


def bottlenecks(bursts: Mapping[Name, Sequence[Burst]]) -> str:
    """Return how it is known that neither the load generator nor the worker bounds what is measured."""
    headroom = _rates(bursts, Name.DIRECT, Name.PLAIN)
    busiest = max(
        burst.load_s / burst.seconds for name, each in bursts.items() for burst in each if name != Name.DIRECT
    )
    return (
        f"without a proxy the same generator and worker do {headroom.show(1)} times plain Envoy's rate; behind one the "
        f"generator was never busy for more than {busiest:.2f} of its core"
    )


def added(single: Mapping[Name, Sequence[Burst]], many: Mapping[Name, Sequence[Burst]]) -> list[str]:
    """Return the added p50 at one connection, beside plain Envoy's own and what says how fast the machine is now."""
    own = _of(single[Name.PLAIN], lambda burst: burst.p50_us)
    rate = _of(many[Name.PLAIN], lambda burst: burst.per_second)
    lines = [f"machine: plain Envoy's own p50 is {own.show(0)} us, and it relays {rate.show(0)} requests/s at most"]
    for name in single:
        if name in {Name.DIRECT, Name.PLAIN}:
            continue
        pairs = list(zip(single[name], single[Name.PLAIN], strict=True))
        more = spread([ours.p50_us - theirs.p50_us for ours, theirs in pairs]).show(0)
        times = ratio([ours.p50_us for ours, _ in pairs], [theirs.p50_us for _, theirs in pairs]).show(1)
        goal = f" (goal less than {ADDED_GOAL_US:,})" if name in GOALS else ""
        lines.append(f"{name.value} adds {more} us{goal}, {times} times plain Envoy's p50")
    return lines


def _rates(bursts: Mapping[Name, Sequence[Burst]], ours: Name, theirs: Name) -> Spread:
    return ratio(*([burst.per_second for burst in bursts[name]] for name in (ours, theirs)))


def _of(bursts: Sequence[Burst], value: Callable[[Burst], float]) -> Spread:
    return spread([value(burst) for burst in bursts])
