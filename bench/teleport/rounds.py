"""What exact replay must do, and what it did. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RESULT: Final = "exact_prompt_result_cache"
LATENT: Final = "exact_prompt_latent_replay"


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture of a trial. `digest`: of its decoded pixels; `spent_s`: inside the engine, else by the clock on the wall."""

    digest: str
    cache: str
    spent_s: float
    wall_s: float
    denoise_calls: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt with one sampler: without teleport, then twice with it, then once more in another format.

    `other`: a replay whose finished picture was never kept, since it is written otherwise, so that latents have to serve it.
    """

    name: str
    baseline: Shot
    prime: Shot
    replay: Shot
    other: Shot

    def faults(self) -> list[str]:
        """Return what was not as it must be, one sentence each."""
        found = []
        if self.prime.cache:
            found.append(f"{self.name}: the prime was served by {self.prime.cache}; give another --seed-offset")
        if self.prime.digest != self.baseline.digest:
            found.append(f"{self.name}: the prime differs from the picture without teleport")
        for kind, shot in (("replay", self.replay), ("replay in another format", self.other)):
            if shot.digest != self.baseline.digest:
                found.append(f"{self.name}: the {kind} differs from the picture without teleport")
            if not shot.cache:
                found.append(f"{self.name}: the {kind} was computed anew")
        if self.other.cache == LATENT and self.other.denoise_calls not in (None, 1):
            found.append(
                f"{self.name}: resuming at the last step made {self.other.denoise_calls} denoise calls instead of 1"
            )
        return found
