"""What checks find, and how that compares with a baseline. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALIKE: Final = 0.999
"""Least cosine of two vectors that count as the same: 8-bit weights round by the shape of the step."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `score`: 0 to 1. Below `floor` it is a failure whatever the baseline says.

    `tolerance`: how far a score may be below the baseline's. `vectors`: kept in the baseline, to be compared with later.
    """

    name: str
    score: float
    detail: str = ""
    floor: float = 0.0
    tolerance: float = 0.0
    vectors: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Scores and vectors of an earlier run, by name."""

    scores: Mapping[str, float] = field(default_factory=dict)
    vectors: Mapping[str, Sequence[float]] = field(default_factory=dict)


def failures(findings: Iterable[Finding], baseline: Baseline) -> list[str]:
    """Return what is wrong, a sentence each: scores below their floor, or below the baseline."""
    found = []
    for each in findings:
        former = baseline.scores.get(each.name)
        if each.score < each.floor:
            found.append(f"{each.name}: {each.score:.3f} is below {each.floor:.3f}; {each.detail}")
        elif former is not None and each.score < former - each.tolerance:
            found.append(f"{each.name}: {each.score:.3f}, the baseline has {former:.3f}; {each.detail}")
    return found


def updated(findings: Iterable[Finding], baseline: Baseline) -> Baseline:
    """Return the baseline with these findings in the place of their former ones."""
    scores, vectors = dict(baseline.scores), dict(baseline.vectors)
    for each in findings:
        scores[each.name] = each.score
        vectors |= each.vectors
    return Baseline(scores, vectors)


def to_json(baseline: Baseline) -> dict[str, Any]:
    """Return a baseline as its file has it."""
    rounded = {name: [round(each, 5) for each in vector] for name, vector in baseline.vectors.items()}
    return {"scores": {name: round(score, 4) for name, score in baseline.scores.items()}, "vectors": rounded}


def from_json(document: Any) -> Baseline:  # noqa: ANN401 - a file's content
    """Return a file's baseline. Raises ValueError when it is none."""
    if not isinstance(document, dict) or not isinstance(document.get("scores"), dict):
        raise ValueError("no baseline: an object with 'scores' is expected")  # noqa: TRY004 - the file's content is at fault
    return Baseline(document["scores"], document.get("vectors", {}))


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 when their lengths differ or one is 0."""
    if len(one) != len(other):
        return 0.0
    norms = sum(x * x for x in one) * sum(y * y for y in other)
    return 0.0 if norms == 0.0 else sum(x * y for x, y in zip(one, other, strict=True)) / norms**0.5


def share(good: Sequence[bool]) -> float:
    """Return how many are true, as a share."""
    return sum(good) / len(good)
