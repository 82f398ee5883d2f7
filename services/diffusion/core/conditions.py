"""Encoded prompts that hosts keep: what may be recalled for what, and what is known about them. Pure."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from services.diffusion.core.wire import Generate, Prompts


def prompt_context(job: Generate, pictures: Iterable[bytes]) -> bytes:
    """Return a digest of all that may decide how a job's prompts are encoded beside their texts and the host's model.

    Empty for what must be encoded anew: adapters change the encoders too, and only encoding tells whether they fit.
    `pictures`: samples of those that the job brings along, which some models read together with the prompt.
    """
    if job.loras:
        return b""
    regions = [job.start, job.mask, *job.references, job.control]
    shapes = [None if each is None else (each.width, each.height, each.channels) for each in regions]
    said = msgspec.json.encode((job.width, job.height, job.clip_skip, shapes))
    digest = hashlib.sha256(said)
    for each in pictures:
        digest.update(hashlib.sha256(each).digest())
    return digest.digest()


@dataclass(slots=True)
class KeptPrompts:
    """What the hosts of a model keep, as far as they have said so, and what was found since the service began.

    `host`: the process id of the host that keeps them, which takes them along when it ends.
    """

    entries: int = 0
    size: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    host: int | None = None
    clears: int = 0

    def learn(self, said: Prompts, host: int | None) -> None:
        """Take what a host says at the end of a job."""
        self._of(host)
        self.hits += said.recalled
        self.misses += said.encoded
        self.evictions += said.evicted
        if said.clears == self.clears:  # else it was said before the host had heard of the last clear
            self.entries, self.size = said.entries, said.size_bytes

    def clear(self, host: int | None) -> tuple[int, int]:
        """Note that the host was told to forget; return entries and bytes that it had."""
        self._of(host)
        gone = self.entries, self.size
        self.clears += 1
        self.entries = self.size = 0
        return gone

    def held(self, host: int | None) -> tuple[int, int]:
        """Return entries and bytes that the present host has."""
        return (self.entries, self.size) if host is not None and host == self.host else (0, 0)

    def _of(self, host: int | None) -> None:
        if host != self.host:
            self.host, self.clears, self.entries, self.size = host, 0, 0, 0
