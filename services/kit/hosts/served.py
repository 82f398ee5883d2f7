"""A model as hosting needs it: everything that is decided before it is loaded."""

from typing import Any, Protocol


class Served(Protocol):
    """A model of a catalogue; every service has a class of its own for it."""

    @property
    def name(self) -> str:
        """What callers call it."""

    @property
    def modality(self) -> str:
        """What its requests ask admission for."""

    @property
    def ttl_s(self) -> float:
        """How long it stays in memory idle, seconds; 0 for ever."""

    @property
    def pinned(self) -> bool:
        """Whether it never makes room for another."""

    @property
    def preload(self) -> bool:
        """Whether it is loaded at the start."""

    @property
    def required(self) -> bool:
        """Whether the service is ready only with it."""

    @property
    def need_mib(self) -> int:
        """Memory it takes, MiB, as its files say."""

    @property
    def profile(self) -> str:
        """What tells this way of running it from another."""

    @property
    def file_mib(self) -> int:
        """Size of its files that are mapped into memory, MiB."""

    @property
    def files(self) -> tuple[str, ...]:
        """Its files, to be read ahead."""

    @property
    def on_host(self) -> bool:
        """Whether it lives in the host's RAM, whatever devices there are."""

    def lease_mib(self, *, seen_mib: int | None, on_host: bool) -> int:
        """Return how much memory to lease. `seen_mib`: the most it was seen to take; `on_host`: the lease is for the host's RAM."""

    def runs_like(self, other: Any) -> bool:  # noqa: ANN401 - of the same class
        """Return whether a host of this one is as good for the other."""
