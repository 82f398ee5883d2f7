"""The catalogue while the service runs: models by name, and requests that use them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from services.kit import telemetry
from services.kit.asking import Asking
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.hosting import OPERATOR, Hosting, Permits, Wait
from services.kit.hosts.resident import Resident
from services.kit.hosts.served import Served
from services.kit.owner import Owner

PROGRESS_S: Final = 1.0
"""How often who waits for a load hears of it."""
_log = telemetry.logger(__name__)
S = TypeVar("S", bound=Served)
R = TypeVar("R", bound=Resident[Any])


@dataclass(frozen=True, slots=True)
class Asker:
    """For whom a model is used."""

    tier: str
    client: str
    request_id: str
    may_wait: bool


class ReplacedError(Exception):
    """The model left the catalogue while a request waited for it: its name may mean another one now."""


class Residents(Generic[S, R]):
    """The models of the catalogue, the default one first. `on_health` hears whether all that must be there are."""

    def __init__(
        self,
        hosting: Hosting[S, R],
        *,
        permits: Permits,
        clock: Clock,
        owner: Owner,
        on_health: Callable[[bool], None],
    ) -> None:
        self._hosting = hosting
        self._permits = permits
        self._clock = clock
        self._owner = owner
        self._on_health = on_health
        hosting.on_change = self.health_changed
        self._catalogue: list[R] = []
        self._read: tuple[S, ...] = ()

    # ---- the catalogue ----------------------------------------------------------------------------------------

    @property
    def catalogue(self) -> Sequence[R]:
        """The models that can be asked for, the default one first."""
        return self._catalogue

    def apply(self, served: tuple[S, ...]) -> None:
        """Serve these models from now on. What runs on those that are gone or changed goes on to its end."""
        if served == self._read:
            return
        unchanged = {each.name: each for each in self._read}
        self._read = served
        before = {each.name: each for each in self._catalogue}
        catalogue = []
        for each in served:
            resident = before.get(each.name)
            if resident is not None and unchanged.get(resident.name) == each:
                del before[resident.name]  # whatever it was swapped for
            elif resident is not None and resident.served.runs_like(each):
                del before[resident.name]
                self._hosting.adjust(resident, each)
            else:
                resident = self._hosting.add(each)
                self.keep(resident)
            catalogue.append(resident)
        self._catalogue = catalogue
        for resident in before.values():
            self._hosting.retire(resident)
        self.health_changed()

    def replace(self, old: R, new: R) -> None:
        """Serve another model in a model's place."""
        self._catalogue[self._catalogue.index(old)] = new
        self._hosting.retire(old)
        self.keep(new)
        self.health_changed()

    def keep(self, resident: R) -> None:
        """See to it that a model that must be there is loaded, and loaded again when it has failed."""
        if resident.served.preload:
            resident.is_required = resident.served.required
            self.prepare(resident)
            self._owner.start(self._preload(resident), name=f"preload {resident.name}")

    def prepare(self, resident: R) -> None:
        """Begin what a model that must be there needs beside its host."""

    async def _preload(self, resident: R) -> None:
        while not resident.retired:
            with self._hosting.waiting(resident, OPERATOR) as wait:
                while not (resident.host.report.state is State.READY or resident.retired or wait.error):
                    await resident.changed.wait()
            if wait.error is not None:
                _log.error("a model that must be there is not", model=resident.name, why=wait.error.message)
                await asyncio.sleep(PROGRESS_S)
            while resident.healthy and not resident.retired:
                await resident.changed.wait()

    def health_changed(self) -> None:
        """Tell whether every model that must be there has been ready and has not failed since."""
        self._on_health(all(each.healthy for each in self._catalogue if each.served.required))

    def is_usable(self, resident: R) -> bool:
        """Return whether a model is loaded and open to requests now."""
        return self._hosting.usable(resident)

    # ---- requests ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(
        self,
        resident: R,
        asker: Asker,
        *,
        on_queued: Callable[[int, int | None], None],
        on_loading: Callable[[float | None], None],
    ) -> AsyncIterator[None]:
        """Hold a permit and the loaded model for the length of the block.

        Who waits for a load stands in no line meanwhile and holds no permit: a cold model keeps nobody else waiting. Raises
        DomainError (admission's, `loading` after the wait's bound, `engine_failed`, `no_capacity`), and ReplacedError.
        """
        with self._hosting.waiting(resident, asker.tier) as wait:
            while True:
                self._check(resident, wait)
                async with self._permits.ask(
                    modality=resident.served.modality,
                    tier=asker.tier,
                    principal=asker.client,
                    request_id=asker.request_id,
                    may_wait=asker.may_wait,
                    on_queued=on_queued,
                ) as asking:
                    if await self._may_ask(resident, asking, wait, on_loading):
                        await asking.granted()
                        if self._hosting.usable(resident):
                            self._hosting.end_wait(resident, wait)
                            with self._hosting.using(resident):
                                yield
                            return
                await self._until_usable(resident, wait, on_loading)

    async def _may_ask(
        self, resident: R, asking: Asking, wait: Wait, on_loading: Callable[[float | None], None]
    ) -> bool:
        """Wait parked for a model that is not there; False when the permit came first and must be given back for that."""
        if self._hosting.usable(resident):
            return True
        if not await asking.park():
            return not asking.held
        await self._until_usable(resident, wait, on_loading)
        asking.ready()
        return True

    async def _until_usable(self, resident: R, wait: Wait, on_loading: Callable[[float | None], None]) -> None:
        while not self._hosting.usable(resident):
            self._check(resident, wait)
            if wait.left_s <= 0:
                raise self._late(resident)
            on_loading(resident.host.report.progress)
            began_s, changed = self._clock.monotonic(), resident.changed
            try:
                async with asyncio.timeout(min(wait.left_s, PROGRESS_S)):
                    await changed.wait()
            except TimeoutError:
                pass
            wait.left_s -= self._clock.monotonic() - began_s

    def _late(self, resident: R) -> DomainError:
        if resident.shortage:
            return DomainError(Reason.NO_CAPACITY, resident.shortage, retry_after_ms=2_000)
        report = resident.host.report
        why = f": {report.failure}" if report.failure else ""
        return DomainError(
            Reason.LOADING,
            f"the model {resident.name!r} is {report.state.value} and was not ready within {self._hosting.load_wait_s:g} s{why}",
            retry_after_ms=2_000,
        )

    def _check(self, resident: R, wait: Wait) -> None:
        if resident.retired:
            raise ReplacedError
        if wait.error is not None:
            raise wait.error
        trouble = resident.trouble
        if trouble is not None and self._clock.monotonic() < trouble.until_s and not self._hosting.usable(resident):
            raise trouble.error
