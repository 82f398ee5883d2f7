"""What the operator does to the catalogue's models beyond loads and unloads: swap."""

from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts import operations
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.core.seats import Phase
from services.kit.hosts.hosting import Hosting
from services.llm.core.catalogue import Kind
from services.llm.resident import Resident
from services.llm.residents import Residents
from services.llm.served import Served


class Operations(operations.Operations[Served, Resident]):
    """Carries out the operator's orders; unloads and swaps one after the other."""

    def __init__(self, residents: Residents, hosting: Hosting[Served, Resident], clock: Clock) -> None:
        super().__init__(hosting, clock)
        self._residents = residents

    async def swap(self, served: Served, *, wait_s: float) -> Resident:
        """Serve another file in place of the default model, and return what serves then.

        Raises DomainError: `upstream_timeout` when running requests outlast `wait_s`, and the load's errors when it fails;
        the former model serves again then.
        """
        async with self.operating:
            old = self._residents.find("", Kind.CHAT)
            if old.served.runs_like(served) and old.host.report.state is State.READY:
                return old
            was_loaded = self.hosting.seat(old).phase is not Phase.ABSENT
            with self.hosting.held(old):
                await self.hosting.empty(old, wait_s)
                new = self.hosting.add(served)
                try:
                    await self.load(new)
                except DomainError as error:
                    self.hosting.retire(new)
                    self.hosting.hold(old, held=False)
                    if was_loaded:
                        await self.load(old)
                    message = f"{error.message}; {old.name!r} serves again"
                    raise DomainError(error.reason, message, field=error.field) from None
                if old.retired:
                    self.hosting.retire(new)
                    raise DomainError(Reason.CONFLICT, f"{old.name!r} left omniserve.yaml while it was to be swapped")
                self._residents.replace(old, new)
            return new
