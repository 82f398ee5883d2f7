"""The catalogue of llm while the service runs: models by name, and their vocabularies."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from typing_extensions import override

from services.kit.clock import Clock
from services.kit.hosts import residents
from services.kit.hosts.hosting import Hosting, Permits
from services.kit.owner import Owner
from services.llm.core.catalogue import Kind, find
from services.llm.resident import Resident
from services.llm.served import Served
from services.llm.vocabularies import Vocabularies


class Residents(residents.Residents[Served, Resident]):
    """The models of the catalogue, the default one first."""

    def __init__(
        self,
        hosting: Hosting[Served, Resident],
        vocabularies: Vocabularies,
        *,
        permits: Permits,
        clock: Clock,
        owner: Owner,
        on_health: Callable[[bool], None],
    ) -> None:
        super().__init__(hosting, permits=permits, clock=clock, owner=owner, on_health=on_health)
        self._vocabularies = vocabularies

    def find(self, asked: str, *kinds: Kind) -> Resident:
        """Return the model of a name; "" is the first that does what is wanted. Raises DomainError."""
        found = find(asked, [each.served.entry for each in self.catalogue], kinds=kinds)
        return next(each for each in self.catalogue if each.served.entry is found)

    @override
    def prepare(self, resident: Resident) -> None:
        if resident.served.entry.kind is Kind.CHAT:
            self._vocabularies.start(resident)

    def visit(self, resident: Resident) -> AbstractContextManager[None]:
        """Have a model's vocabulary for the length of the block."""
        return self._vocabularies.visit(resident)
