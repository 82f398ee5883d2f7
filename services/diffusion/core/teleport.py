"""Exact replay: what was made from the very same inputs is not made again. Never anything that is merely alike.

Two caches. Finished pictures are found by everything that decides a byte of the file; the denoiser's results by everything
that decides those, which leaves out how latents become pixels and pixels a file. Both keep the newest that were used, bounded in
number and in bytes; a picture and its latents leave together.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from services.diffusion.core.options import Encoding
from services.diffusion.core.wire import Sampling, Tiling

MOST_ENTRIES: Final = 256
_SEEDS: Final = 2**31
_MOST_FORMS: Final = 4
"""Finished pictures that are kept of the same latents, in several formats for example."""


class Inputs(msgspec.Struct, frozen=True, array_like=True):
    """What decides the denoiser's results. `model`: fingerprint of the files; `engine`: its version; `settings`: how it runs.

    `sources`: digests of the pictures it starts from; `loras`: digests with strengths; `seed`: None while it is to be chosen.
    """

    model: str
    engine: str
    settings: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    sampling: Sampling
    clip_skip: int
    loras: tuple[tuple[str, float], ...]
    sources: tuple[str, ...]
    strength: float
    control_strength: float
    start_step: int
    seed: int | None


def derived_seed(inputs: Inputs) -> int:
    """Return the seed of a request that names none: it follows from the other inputs, so that a repeat is one."""
    return int.from_bytes(bytes.fromhex(latent_key(inputs))[:8], "big") % _SEEDS


def latent_key(inputs: Inputs) -> str:
    """Return the key of the denoiser's results."""
    return hashlib.sha256(b"latents\0" + msgspec.json.encode(inputs)).hexdigest()


def result_key(inputs: Inputs, tiling: Tiling | None, encoding: Encoding, model: str) -> str:
    """Return the key of a finished picture. `model`: the name that is written into it."""
    written = (encoding.format.value, encoding.quality, encoding.effort, encoding.embeds, model)
    return hashlib.sha256(b"result\0" + msgspec.json.encode((inputs, tiling, written))).hexdigest()


def resumes_at(asked: int | None, default: int, steps: int) -> int:
    """Return the step from which denoising resumes: what was asked for, cut to the last."""
    return max(0, min(default if asked is None else asked, steps - 1))


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished picture as a file."""

    data: bytes
    width: int
    height: int
    channels: int
    sampler: str
    scheduler: str

    @property
    def size(self) -> int:
        """Bytes it takes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Latents:
    """What the denoiser gave: so many results, one after the other."""

    data: bytes
    count: int

    @property
    def size(self) -> int:
        """Bytes it takes."""
        return len(self.data)


@dataclass(slots=True)
class Tally:
    """What was found and what was not, since the start."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Entry:
    """What was made from the same inputs of the denoiser: its results, and the pictures that came of them."""

    model: str
    latents: Latents | None = None
    results: dict[str, Finished] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.results.values()) + (self.latents.size if self.latents else 0)


class Cache:
    """Both caches. `most_entries`, `most_bytes`: their bounds together."""

    def __init__(self, most_entries: int, most_bytes: int) -> None:
        self.most_entries = most_entries
        self.most_bytes = most_bytes
        self.results = Tally()
        self.latents = Tally()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    def has(self, latents: str, key: str) -> bool:
        """Return whether a finished picture is there, which counts as no look-up."""
        entry = self._entries.get(latents)
        return entry is not None and key in entry.results

    def result(self, latents: str, key: str) -> Finished | None:
        """Return a finished picture by the keys of its latents and its own."""
        entry = self._entries.get(latents)
        found = entry.results.get(key) if entry is not None else None
        self._note(self.results, latents, hit=found is not None)
        return found

    def replay(self, latents: str) -> Latents | None:
        """Return the denoiser's results."""
        entry = self._entries.get(latents)
        found = entry.latents if entry is not None else None
        self._note(self.latents, latents, hit=found is not None)
        return found

    def _note(self, tally: Tally, key: str, *, hit: bool) -> None:
        tally.hits += hit
        tally.misses += not hit
        if hit:
            self._entries.move_to_end(key)

    def keep(self, latents: str, model: str, found: Latents) -> None:
        """Keep the denoiser's results."""
        entry = self._entry(latents, model)
        self._bytes += found.size - (entry.latents.size if entry.latents else 0)
        entry.latents = found
        self._shrink()

    def keep_result(self, latents: str, key: str, model: str, found: Finished) -> None:
        """Keep a finished picture."""
        entry = self._entry(latents, model)
        former = entry.results.get(key)
        self._bytes += found.size - (former.size if former else 0)
        entry.results[key] = found
        if len(entry.results) > _MOST_FORMS:
            self._bytes -= entry.results.pop(next(iter(entry.results))).size
            self.results.evictions += 1
        self._shrink()

    def _entry(self, key: str, model: str) -> _Entry:
        entry = self._entries.setdefault(key, _Entry(model))
        self._entries.move_to_end(key)
        return entry

    def _shrink(self) -> None:
        while self._entries and (len(self._entries) > self.most_entries or self._bytes > self.most_bytes):
            _, entry = self._entries.popitem(last=False)
            self._bytes -= entry.size
            self.results.evictions += len(entry.results)
            self.latents.evictions += entry.latents is not None

    def clear(self, model: str | None) -> tuple[int, int]:
        """Forget all, or all of one model; return how many entries and bytes that were."""
        gone = [key for key, entry in self._entries.items() if model is None or entry.model == model]
        size = 0
        for key in gone:
            size += self._entries.pop(key).size
        self._bytes -= size
        return len(gone), size

    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return how many finished pictures there are and their bytes, and the same of the denoiser's results."""
        results = [each for entry in self._entries.values() for each in entry.results.values()]
        latents = list(self._latents())
        return (len(results), sum(each.size for each in results)), (len(latents), sum(each.size for each in latents))

    def _latents(self) -> Iterator[Latents]:
        return (entry.latents for entry in self._entries.values() if entry.latents is not None)
