"""What the operator does to the catalogue's models: load, unload, swap."""

import asyncio

from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.llm.core.catalogue import Kind
from services.llm.core.lifecycle import State
from services.llm.core.seats import Phase
from services.llm.hosting import OPERATOR, Hosting
from services.llm.resident import Resident
from services.llm.residents import PROGRESS_S, Residents
from services.llm.served import Served


class Operations:
    """Carries out the operator's orders; unloads and swaps one after the other."""

    def __init__(self, residents: Residents, hosting: Hosting, clock: Clock) -> None:
        self._residents = residents
        self._hosting = hosting
        self._clock = clock
        self._operating = asyncio.Lock()

    async def load(self, resident: Resident) -> None:
        """Have a model in memory. Raises DomainError `engine_failed` or `no_capacity`."""
        with self._hosting.waiting(resident, OPERATOR) as wait:
            while resident.host.report.state is not State.READY:
                if wait.error is not None:
                    raise wait.error
                seat = self._hosting.seat(resident)
                if wait.left_s <= 0 and seat.phase is Phase.ABSENT:
                    message = (
                        f"the others did not make room for {resident.name!r} within {self._hosting.load_wait_s:g} s"
                    )
                    raise DomainError(Reason.NO_CAPACITY, message, retry_after_ms=2_000)
                began_s, changed = self._clock.monotonic(), resident.changed
                try:
                    async with asyncio.timeout(PROGRESS_S):
                        await changed.wait()
                except TimeoutError:
                    pass
                wait.left_s -= self._clock.monotonic() - began_s

    async def unload(self, resident: Resident, *, wait_s: float) -> None:
        """Free a model's memory when its running requests have ended. Raises DomainError `upstream_timeout`."""
        async with self._operating:
            with self._hosting.held(resident):
                await self._hosting.empty(resident, wait_s)

    async def swap(self, served: Served, *, wait_s: float) -> Resident:
        """Serve another file in place of the default model, and return what serves then.

        Raises DomainError: `upstream_timeout` when running requests outlast `wait_s`, and the load's errors when it fails;
        the former model serves again then.
        """
        async with self._operating:
            old = self._residents.find("", Kind.CHAT)
            if old.served.runs_like(served) and old.host.report.state is State.READY:
                return old
            was_loaded = self._hosting.seat(old).phase is not Phase.ABSENT
            with self._hosting.held(old):
                await self._hosting.empty(old, wait_s)
                new = self._hosting.add(served)
                try:
                    await self.load(new)
                except DomainError as error:
                    self._hosting.retire(new)
                    self._hosting.hold(old, held=False)
                    if was_loaded:
                        await self.load(old)
                    message = f"{error.message}; {old.name!r} serves again"
                    raise DomainError(error.reason, message, field=error.field) from None
                if old.retired:
                    self._hosting.retire(new)
                    raise DomainError(Reason.CONFLICT, f"{old.name!r} left omniserve.yaml while it was to be swapped")
                self._residents.replace(old, new)
            return new
