"""How a picture is cut into tiles to be enlarged: each with some of its surroundings, which are cut off afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One side of a tile: `first` to `last` is read, and of that the part from `keep` to `until` is used; pixels."""

    first: int
    last: int
    keep: int
    until: int


def spans(length: int, *, tile: int, margin: int) -> Iterator[Span]:
    """Yield the spans that cover a length: what is used of them lies side by side, without gap or overlap."""
    for keep in range(0, length, tile):
        until = min(keep + tile, length)
        yield Span(max(0, keep - margin), min(length, until + margin), keep, until)
