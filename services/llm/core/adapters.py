"""LoRA adapters per request: which are meant, and whose turn it is, since a step can compute with one set of them only."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from services.kit.errors import DomainError, Reason

AdapterSet = tuple[tuple[str, float], ...]
"""Names with their strengths, none of them 0, in the order of the catalogue; empty is the model as it is."""

MOST_ADAPTERS: Final = 8
MOST_SCALE: Final = 16.0
STEPS: Final = 8
"""Steps of one set in a row while others wait. Changing the set makes llama.cpp plan its buffers anew."""


@dataclass(frozen=True, slots=True)
class AskedAdapter:
    """An adapter as the caller wrote it: its name, or its place in the catalogue from 0. `scale` None means 1."""

    name: str
    scale: float | None = None


def adapter_set(asked: Sequence[AskedAdapter], known: Sequence[str]) -> AdapterSet:
    """Return what is meant. Strength 0 is the same as not asking. Raises DomainError `invalid_request`."""
    path = "options.adapters"
    if len(asked) > MOST_ADAPTERS:
        raise _refusal(path, f"has {len(asked)} adapters; at most {MOST_ADAPTERS} are allowed")
    scales: dict[str, float] = {}
    for place, each in enumerate(asked):
        name = _meant(each.name, known)
        if name is None:
            there = f"there are {', '.join(map(repr, known))}" if known else "this model has none"
            raise _refusal(
                f"{path}[{place}].name", f"is {each.name[:100]!r}, which is no adapter of this model; {there}"
            )
        if name in scales:
            raise _refusal(f"{path}[{place}].name", f"is {name!r} again; each adapter may be there once")
        scale = 1.0 if each.scale is None else each.scale
        if not (math.isfinite(scale) and abs(scale) <= MOST_SCALE):
            raise _refusal(f"{path}[{place}].scale", f"is {scale:g}; {-MOST_SCALE:g} to {MOST_SCALE:g} is allowed")
        scales[name] = scale
    return tuple((name, scales[name]) for name in known if scales.get(name))


def _meant(asked: str, known: Sequence[str]) -> str | None:
    if asked in known:
        return asked
    if asked.isascii() and asked.isdecimal() and len(asked) <= 4 and int(asked) < len(known):
        return known[int(asked)]
    return None


def _refusal(path: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {sentence}", field=path)


class Turns:
    """Whose turn it is among sets of adapters: `STEPS` steps each, the one that has waited longest next."""

    def __init__(self, steps: int = STEPS) -> None:
        self._steps = steps
        self._current: AdapterSet | None = None
        self._taken = 0
        self._clock = 0
        self._served: dict[AdapterSet, int] = {}

    def next(self, present: Collection[AdapterSet]) -> AdapterSet:
        """Return the set of the next step; `present`: those of the running sequences, at least one."""
        self._clock += 1
        goes_on = self._current in present and (self._taken < self._steps or len(present) == 1)
        if not goes_on or self._current is None:
            self._served = {each: at for each, at in self._served.items() if each in present}
            self._current = min(present, key=lambda each: self._served.get(each, 0))
            self._taken = 0
        self._taken += 1
        self._served[self._current] = self._clock
        return self._current
