"""A model of diffusion's catalogue while the service runs."""

from collections.abc import Callable, Mapping
from typing import Any

from services.diffusion.adapters.engine import Engine
from services.diffusion.served import Served
from services.kit.clock import Clock
from services.kit.hosts import resident
from services.kit.hosts.keeper import EngineLimits


class Resident(resident.Resident[Served]):
    """One model, with its host."""

    def __init__(
        self,
        key: int,
        served: Served,
        *,
        limits: EngineLimits,
        clock: Clock,
        environ: Mapping[str, str],
        cancel_s: float,
        on_state: Callable[[Any], None],
    ) -> None:
        super().__init__(key, served, on_state=on_state)
        self.engine = Engine(served.config, limits, clock, environ=environ, cancel_s=cancel_s, on_state=self.hear)
        self.host = self.engine
