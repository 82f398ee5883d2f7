"""A model of llm's catalogue while the service runs: its two hosts, and what is known about them."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from services.kit.clock import Clock
from services.kit.hosts import resident
from services.kit.hosts.keeper import EngineLimits
from services.llm.adapters.embedder import Embedder
from services.llm.adapters.engine import Engine
from services.llm.adapters.text import TextHost
from services.llm.core.embed_wire import EmbedConfig
from services.llm.served import Served


class Resident(resident.Resident[Served]):
    """One model. `last_visit_s`: when its vocabulary was used last; `texting`: the task that runs its text host."""

    def __init__(
        self,
        key: int,
        served: Served,
        *,
        limits: EngineLimits,
        clock: Clock,
        environ: Mapping[str, str],
        on_state: Callable[[Any], None],
    ) -> None:
        super().__init__(key, served, on_state=on_state)
        self.last_visit_s = 0.0
        self.texting: asyncio.Task[None] | None = None
        self.texts_again = False
        self._engine: Engine | None = None
        self._embedder: Embedder | None = None
        if isinstance(served.engine, EmbedConfig):
            self.host = self._embedder = Embedder(served.engine, limits, clock, environ=environ, on_state=self.hear)
        else:
            self.host = self._engine = Engine(served.engine, limits, clock, environ=environ, on_state=self.hear)
        self.text = TextHost(served.text, environ=environ)

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

    @override
    def companions(self) -> list[asyncio.Task[None]]:
        texting = [self.texting] if self.texting is not None else []
        return [*super().companions(), *texting]
