"""What a candidate must reach, and what a comparison found. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.measure import Spread, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.parity.likeness import Likeness


@dataclass(frozen=True, slots=True)
class Gates:
    """Least structure and colours in common, most entropy lost or gained (bits), most sharpness lost or gained (a share), slowest."""

    structure: float = 0.80
    colour: float = 0.60
    entropy_bits: float = 0.5
    sharpness: float = 0.5
    latency: float = 1.25


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each prompt's picture. `inside`: None unless every answer told the time inside the engine."""

    wall: tuple[float, ...]
    inside: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Prices:
    """What the devices cost, USD an hour, and how many pictures a month are made."""

    reference_usd_hr: float = 1.0
    candidate_usd_hr: float = 1.0
    pictures_a_month: int = 100_000


@dataclass(frozen=True, slots=True)
class Speed:
    """Latency, candidate over reference, by what was measured; and what a month costs, USD."""

    by: str
    latency: Spread
    wall: Spread
    reference_usd: float
    candidate_usd: float

    @property
    def cost(self) -> float:
        """A month's cost, candidate over reference."""
        return self.candidate_usd / self.reference_usd if self.reference_usd else float("inf")


@dataclass(slots=True)
class Verdict:
    """Every gate that was missed, one sentence each."""

    missed: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether none was."""
        return not self.missed


def speed_of(reference: Times, candidate: Times, prices: Prices) -> Speed:
    """Return how fast the candidate is: by the time inside the engines where both tell it, else by the clock on the wall."""
    wall = ratio(candidate.wall, reference.wall)
    by, slower, faster = "wall time", candidate.wall, reference.wall
    if reference.inside is not None and candidate.inside is not None:
        by, slower, faster = "time inside the engine", candidate.inside, reference.inside
    return Speed(
        by=by,
        latency=ratio(slower, faster),
        wall=wall,
        reference_usd=month_usd(faster, prices.reference_usd_hr, prices.pictures_a_month),
        candidate_usd=month_usd(slower, prices.candidate_usd_hr, prices.pictures_a_month),
    )


def month_usd(seconds: Sequence[float], usd_hr: float, pictures: int) -> float:
    """Return what a month's pictures cost on a device that does nothing else, by the median second."""
    return spread(seconds).median * pictures / 3600 * usd_hr


def judge(name: str, likeness: Likeness, gates: Gates, verdict: Verdict) -> None:
    """Note the gates that one picture misses."""
    checks = (
        (likeness.structure >= gates.structure, f"structure {likeness.structure:.3f}, at least {gates.structure:g}"),
        (likeness.colour >= gates.colour, f"colours in common {likeness.colour:.3f}, at least {gates.colour:g}"),
        (
            abs(likeness.entropy_drift) <= gates.entropy_bits,
            f"entropy drifts by {likeness.entropy_drift:+.2f} bits, at most {gates.entropy_bits:g}",
        ),
        (
            abs(likeness.sharpness - 1) <= gates.sharpness,
            f"sharpness is {likeness.sharpness:.2f} times the reference's, at most {gates.sharpness:g} off",
        ),
    )
    verdict.missed += [f"{name}: {sentence}" for held, sentence in checks if not held]


def judge_speed(speed: Speed, gates: Gates, verdict: Verdict) -> None:
    """Note it when the candidate is too slow."""
    if speed.latency.median > gates.latency:
        verdict.missed.append(f"latency is {speed.latency.median:.2f} times the reference's, at most {gates.latency:g}")
