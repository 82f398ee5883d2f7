"""The catalogue of diffusion while the service runs: models by name, and those that cannot be served with the reason."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from services.diffusion.catalogue_file import read_catalogue, split
from services.diffusion.core.catalogue import Kind, find
from services.diffusion.resident import Resident
from services.diffusion.served import Broken, Served
from services.diffusion.settings import DiffusionSettings
from services.kit import telemetry
from services.kit.clock import Clock
from services.kit.config import ConfigError
from services.kit.errors import DomainError, Reason
from services.kit.hosts import residents
from services.kit.hosts.hosting import Hosting, Permits
from services.kit.owner import Owner

_log = telemetry.logger(__name__)


class Residents(residents.Residents[Served, Resident]):
    """The models of the settings or of omniserve.yaml. `broken`: those whose files cannot be used now."""

    def __init__(
        self,
        hosting: Hosting[Served, Resident],
        settings: DiffusionSettings,
        *,
        permits: Permits,
        clock: Clock,
        owner: Owner,
        on_health: Callable[[bool], None],
    ) -> None:
        super().__init__(hosting, permits=permits, clock=clock, owner=owner, on_health=on_health)
        self.broken: Sequence[Broken] = ()
        self._settings = settings

    def look(self) -> tuple[Served | Broken, ...]:
        """Look at the model files, as settings and omniserve.yaml name them now. Raises ConfigError."""
        return read_catalogue(self._settings)

    def take(self, found: Sequence[Served | Broken]) -> None:
        """Serve what was found from now on."""
        served, self.broken = split(found)
        for each in self.broken:
            _log.error("a model cannot be served", model=each.entry.name, why=each.why)
        self.apply(served)

    def find(self, asked: str, kind: Kind) -> Resident:
        """Return the model of a name; "" is the first that does what is wanted.

        Raises DomainError: `not_found`, `invalid_request` for a model that does something else, and `unsupported` with the
        reason for one whose files cannot be used; they are looked at again before.
        """
        return self._find(asked, (kind,))

    def find_any(self, asked: str) -> Resident:
        """Return a model of whatever kind by its name; "" is the image model. Raises DomainError."""
        return self._find(asked, tuple(Kind) if asked else (Kind.IMAGE,))

    def _find(self, asked: str, kinds: Sequence[Kind]) -> Resident:
        known = [*(each.served.entry for each in self.catalogue), *(each.entry for each in self.broken)]
        found = find(asked, known, kinds)
        if any(each.entry is found for each in self.broken):
            with suppress(ConfigError):  # what was read before goes on; the log has it
                self.take(self.look())
            for each in self.broken:
                if each.entry.name == found.name:
                    raise DomainError(
                        Reason.UNSUPPORTED, f"the model {found.name!r} cannot be served: {each.why}", field="model"
                    )
        return next(each for each in self.catalogue if each.name == found.name)
