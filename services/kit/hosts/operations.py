"""What the operator does to the catalogue's models: load and unload."""

import asyncio
from typing import Any, Generic, TypeVar

from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.core.seats import Phase
from services.kit.hosts.hosting import OPERATOR, Hosting
from services.kit.hosts.resident import Resident
from services.kit.hosts.residents import PROGRESS_S
from services.kit.hosts.served import Served

S = TypeVar("S", bound=Served)
R = TypeVar("R", bound=Resident[Any])


class Operations(Generic[S, R]):
    """Carries out the operator's orders; unloads one after the other."""

    def __init__(self, hosting: Hosting[S, R], clock: Clock) -> None:
        self.hosting = hosting
        self._clock = clock
        self.operating = asyncio.Lock()

    async def load(self, resident: R) -> None:
        """Have a model in memory. Raises DomainError `engine_failed` or `no_capacity`."""
        with self.hosting.waiting(resident, OPERATOR) as wait:
            while resident.host.report.state is not State.READY:
                if wait.error is not None:
                    raise wait.error
                seat = self.hosting.seat(resident)
                if wait.left_s <= 0 and seat.phase is Phase.ABSENT:
                    message = (
                        f"the others did not make room for {resident.name!r} within {self.hosting.load_wait_s:g} s"
                    )
                    raise DomainError(Reason.NO_CAPACITY, message, retry_after_ms=2_000)
                began_s, changed = self._clock.monotonic(), resident.changed
                try:
                    async with asyncio.timeout(PROGRESS_S):
                        await changed.wait()
                except TimeoutError:
                    pass
                wait.left_s -= self._clock.monotonic() - began_s

    async def unload(self, resident: R, *, wait_s: float) -> None:
        """Free a model's memory when its running requests have ended. Raises DomainError `upstream_timeout`."""
        async with self.operating:
            with self.hosting.held(resident):
                await self.hosting.empty(resident, wait_s)
