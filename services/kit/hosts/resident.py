"""A model of the catalogue while the service runs: its host, and what is known about it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from services.kit.errors import DomainError
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.leases import Claim  # noqa: TC001 - a value's type like those above
from services.kit.hosts.served import Served

MOST_LOADS = 3
"""How often in a row a load may die before those who wait for it are told."""
S = TypeVar("S", bound=Served)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a model cannot be had, and until when nobody tries again, seconds of the monotonic clock."""

    error: DomainError
    until_s: float


class HostReport(Protocol):
    """What is known about a host without asking it."""

    @property
    def state(self) -> State:
        """Whether it can serve."""

    @property
    def pid(self) -> int | None:
        """Its process, while there is one."""

    @property
    def progress(self) -> float | None:
        """How far its load is, 0 to 1."""

    @property
    def failure(self) -> str | None:
        """Why it failed."""


class Host(Protocol):
    """A model's host process as the residency needs it."""

    @property
    def report(self) -> HostReport:
        """What is known about it."""

    async def supervise(self) -> None:
        """Keep it running until cancelled; when this is left, however, there is none any more."""


class Resident(Generic[S]):
    """One model. `key`: its seat; `healthy`: it has been ready and has not failed since. Whoever makes one sets its `host`.

    `is_required`: the service is ready only with it, and loading it is tried for ever. `retired`: it is in the catalogue no
    more. `visitors`: calls that may soon use it. `life`, `asking`: the tasks that run its host and ask for leave to load it.
    `rank`: how important the load was; `claim`: the memory that it lives on; `shortage`: why there was none.
    """

    host: Host

    def __init__(self, key: int, served: S, *, on_state: Callable[[Any], None]) -> None:
        self.key = key
        self.served = served
        self.healthy = False
        self.is_required = False
        self.retired = False
        self.visitors = 0
        self.life: asyncio.Task[None] | None = None
        self.asking: asyncio.Task[None] | None = None
        self.rank = 0
        self.claim: Claim | None = None
        self.shortage = ""
        self.trouble: Trouble | None = None
        self.failures = 0
        self._on_state = on_state
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """What callers call it."""
        return self.served.name

    @property
    def changed(self) -> asyncio.Event:
        """The event that the next news sets, other than a load's progress. Take it before looking."""
        return self._changed

    def companions(self) -> list[asyncio.Task[None]]:
        """Return the tasks, beside its host's, that end with it."""
        return [self.asking] if self.asking is not None else []

    def tell(self) -> None:
        """Wake those who wait for news."""
        self._changed.set()
        self._changed = asyncio.Event()

    def hear(self, state: State) -> None:
        """Note what state the host is in now."""
        if state is State.READY:
            self.healthy, self.failures, self.trouble = True, 0, None
        elif state is State.FAILED:
            self.healthy = False
        self._on_state(self)
        self.tell()
