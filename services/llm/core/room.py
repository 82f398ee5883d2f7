"""Who gives way when the KV cache is full."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides who gives way: larger `rank` is more important, larger `arrival` came later."""

    rank: int
    arrival: int


def gives_way(claims: Sequence[Claim]) -> int:
    """Return the index of the one to suspend: the least important, and of those the newest."""
    return min(range(len(claims)), key=lambda index: (claims[index].rank, -claims[index].arrival))


def comes_back(claims: Sequence[Claim]) -> int:
    """Return the index of the one to resume first: the most important, and of those the oldest."""
    return min(range(len(claims)), key=lambda index: (-claims[index].rank, claims[index].arrival))
