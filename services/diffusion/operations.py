"""What is told about the models, and what the operator does to them."""

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from services.diffusion import translate
from services.diffusion.core.teleport import Cache
from services.diffusion.resident import Resident
from services.diffusion.residents import Residents
from services.diffusion.served import Served
from services.kit.clock import Clock
from services.kit.hosts import operations
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.hosting import Hosting


class Operations(operations.Operations[Served, Resident]):
    """Carries out the operator's orders; unloads one after the other."""

    def __init__(
        self,
        residents: Residents,
        hosting: Hosting[Served, Resident],
        clock: Clock,
        cache: Cache,
        *,
        max_batch: int,
        start_step: int,
    ) -> None:
        super().__init__(hosting, clock)
        self.residents = residents
        self._clock_now = clock
        self.cache = cache
        self._max_batch = max_batch
        self._start_step = start_step

    def model(self, resident: Resident) -> pb.Model:
        """Return a model with its state."""
        return translate.model(resident, max_batch=self._max_batch)

    def models(self) -> list[pb.Model]:
        """Return the catalogue, the default model first."""
        known = [self.model(each) for each in self.residents.catalogue]
        broken = [translate.broken(each) for each in self.residents.broken]
        return sorted([*known, *broken], key=lambda each: each.kind)

    def engines(self) -> list[pb.EngineStatus]:
        """Return every model that is loaded, loading, or has failed."""
        hosted = [each for each in self.residents.catalogue if each.host.report.state is not State.AVAILABLE]
        return [self._engine(each) for each in hosted]

    def _engine(self, resident: Resident) -> pb.EngineStatus:
        seat = self.hosting.seat(resident)
        is_idle = seat.active == 0 and seat.used_s > 0
        idle_ms = round((self._clock_now.monotonic() - seat.used_s) * 1000) if is_idle else None
        status = translate.status(resident, active=seat.active, idle_ms=idle_ms)
        if resident.claim is not None and resident.claim.lease_id:
            status.lease_id, status.leased_mib = resident.claim.lease_id, seat.need_mib
        return status

    def teleport(self) -> pb.TeleportStatus:
        """Return the state of the exact caches."""
        painters = [each for each in self.residents.catalogue if each.served.family]
        ready = next((each.engine.report.ready for each in painters if each.engine.report.ready), None)
        absent = "no image model is loaded"
        return translate.teleport_status(
            self.cache,
            translate.prompts_status(painters, reason=absent if ready is None else ready.prompts_reason),
            start_step=self._start_step,
            native=ready is not None and ready.native,
            reason=absent if ready is None else ready.native_reason,
        )

    def clear(self, model: str | None, *, pictures: bool, prompts: bool) -> tuple[int, int]:
        """Empty the exact caches, of one model or of all; return entries and bytes. Raises DomainError `not_found`.

        `pictures`: those of finished pictures and their latents; `prompts`: that of encoded prompts.
        """
        one = self.residents.find_any(model) if model is not None else None
        gone = [self.cache.clear(None if one is None else one.name)] if pictures else []
        if prompts:
            gone += [each.engine.forget_prompts() for each in self.residents.catalogue if one is None or each is one]
        return sum(entries for entries, _ in gone), sum(size for _, size in gone)

    def engine_version(self) -> str:
        """Return the version of the engine, as a host that runs tells it."""
        for each in self.residents.catalogue:
            ready = each.engine.report.ready
            if ready is not None:
                return ready.version
        return ""
