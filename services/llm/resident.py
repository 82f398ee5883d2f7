"""A model of the catalogue while the service runs: its hosts, and what is known about them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from services.kit.clock import Clock
from services.kit.errors import DomainError
from services.llm.adapters.embedder import Embedder
from services.llm.adapters.engine import Engine
from services.llm.adapters.keeper import EngineLimits
from services.llm.adapters.text import TextHost
from services.llm.core.embed_wire import EmbedConfig
from services.llm.core.lifecycle import State
from services.llm.leases import Claim  # noqa: TC001 - a value's type like those above
from services.llm.served import Served

MOST_LOADS = 3
"""How often in a row a load may die before those who wait for it are told."""


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


class Resident:
    """One model. `key`: its seat; `healthy`: it has been ready and has not failed since.

    `is_required`: the service is ready only with it, and loading it is tried for ever. `retired`: it is in the catalogue no
    more. `visitors`: calls that use its vocabulary or may soon. `life`, `asking`, `texting`: the tasks that run its engine
    host, ask for leave to load it, and run its text host. `rank`: how important the load was; `claim`: the memory that it lives
    on; `shortage`: why there was none.
    """

    def __init__(
        self,
        key: int,
        served: Served,
        *,
        limits: EngineLimits,
        clock: Clock,
        environ: Mapping[str, str],
        on_state: Callable[["Resident"], None],
    ) -> None:
        self.key = key
        self.served = served
        self.healthy = False
        self.is_required = False
        self.retired = False
        self.visitors = 0
        self.last_visit_s = 0.0
        self.life: asyncio.Task[None] | None = None
        self.asking: asyncio.Task[None] | None = None
        self.texting: asyncio.Task[None] | None = None
        self.texts_again = False
        self.rank = 0
        self.claim: Claim | None = None
        self.shortage = ""
        self.trouble: Trouble | None = None
        self.failures = 0
        self._on_state = on_state
        self._changed = asyncio.Event()
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        self.host: Host
        if isinstance(served.engine, EmbedConfig):
            self.host = self._embedder = Embedder(served.engine, limits, clock, environ=environ, on_state=self._hear)
        else:
            self.host = self._engine = Engine(served.engine, limits, clock, environ=environ, on_state=self._hear)
        self.text = TextHost(served.text, environ=environ)

    @property
    def name(self) -> str:
        """What callers call it."""
        return self.served.entry.name

    @property
    def engine(self) -> Engine:
        """The host of a model that generates text. Raises TypeError for any other."""
        if self._engine is None:
            raise TypeError(f"{self.name} generates no text")
        return self._engine

    @property
    def embedder(self) -> Embedder:
        """The host of a model that makes vectors or scores pairs. Raises TypeError for any other."""
        if self._embedder is None:
            raise TypeError(f"{self.name} makes no vectors")
        return self._embedder

    @property
    def context_tokens(self) -> int:
        """Most tokens of one request, or of one input."""
        ready = None if self._engine is None else self._engine.report.ready
        return self.served.context_tokens if ready is None else ready.context_tokens

    @property
    def changed(self) -> asyncio.Event:
        """The event that the next news sets, other than a load's progress. Take it before looking."""
        return self._changed

    def tell(self) -> None:
        """Wake those who wait for news."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _hear(self, state: State) -> None:
        if state is State.READY:
            self.healthy, self.failures, self.trouble = True, 0, None
        elif state is State.FAILED:
            self.healthy = False
        self._on_state(self)
        self.tell()
