"""The catalogue while the service runs: models by name, and requests that use them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from services.kit import telemetry
from services.kit.asking import Asking
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner
from services.llm.core.catalogue import Kind, find
from services.llm.core.lifecycle import State
from services.llm.hosting import OPERATOR, Hosting, Permits, Wait
from services.llm.resident import Resident
from services.llm.served import Served

PROGRESS_S: Final = 1.0
"""How often who waits for a load hears of it."""
_log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Asker:
    """For whom a model is used."""

    tier: str
    client: str
    request_id: str
    may_wait: bool


class ReplacedError(Exception):
    """The model left the catalogue while a request waited for it: its name may mean another one now."""


class Residents:
    """The models of the catalogue, the default one first. `on_health` hears whether all that must be there are."""

    def __init__(
        self,
        hosting: Hosting,
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
        self._catalogue: list[Resident] = []
        self._read: tuple[Served, ...] = ()

    # ---- the catalogue ----------------------------------------------------------------------------------------

    @property
    def catalogue(self) -> Sequence[Resident]:
        """The models that can be asked for, the default one first."""
        return self._catalogue

    def find(self, asked: str, *kinds: Kind) -> Resident:
        """Return the model of a name; "" is the first that does what is wanted. Raises DomainError."""
        found = find(asked, [each.served.entry for each in self._catalogue], kinds=kinds)
        return next(each for each in self._catalogue if each.served.entry is found)

    def apply(self, served: tuple[Served, ...]) -> None:
        """Serve these models from now on. What runs on those that are gone or changed goes on to its end."""
        if served == self._read:
            return
        unchanged = {each.entry.name: each for each in self._read}
        self._read = served
        before = {each.name: each for each in self._catalogue}
        catalogue = []
        for each in served:
            resident = before.get(each.entry.name)
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

    def replace(self, old: Resident, new: Resident) -> None:
        """Serve another model in a model's place."""
        self._catalogue[self._catalogue.index(old)] = new
        self._hosting.retire(old)
        self.keep(new)
        self.health_changed()

    def keep(self, resident: Resident) -> None:
        """See to it that a model that must be there is loaded, and loaded again when it has failed."""
        if resident.served.preload:
            resident.is_required = resident.served.required
            if resident.served.entry.kind is Kind.CHAT:
                self._hosting.vocabularies.start(resident)
            self._owner.start(self._preload(resident), name=f"preload {resident.name}")

    async def _preload(self, resident: Resident) -> None:
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

    def is_usable(self, resident: Resident) -> bool:
        """Return whether a model is loaded and open to requests now."""
        return self._hosting.usable(resident)

    # ---- requests ---------------------------------------------------------------------------------------------

    def visit(self, resident: Resident) -> AbstractContextManager[None]:
        """Have a model's vocabulary for the length of the block."""
        return self._hosting.vocabularies.visit(resident)

    @asynccontextmanager
    async def use(
        self,
        resident: Resident,
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
        self, resident: Resident, asking: Asking, wait: Wait, on_loading: Callable[[float | None], None]
    ) -> bool:
        """Wait parked for a model that is not there; False when the permit came first and must be given back for that."""
        if self._hosting.usable(resident):
            return True
        if not await asking.park():
            return not asking.held
        await self._until_usable(resident, wait, on_loading)
        asking.ready()
        return True

    async def _until_usable(self, resident: Resident, wait: Wait, on_loading: Callable[[float | None], None]) -> None:
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

    def _late(self, resident: Resident) -> DomainError:
        if resident.shortage:
            return DomainError(Reason.NO_CAPACITY, resident.shortage, retry_after_ms=2_000)
        report = resident.host.report
        why = f": {report.failure}" if report.failure else ""
        return DomainError(
            Reason.LOADING,
            f"the model {resident.name!r} is {report.state.value} and was not ready within {self._hosting.load_wait_s:g} s{why}",
            retry_after_ms=2_000,
        )

    def _check(self, resident: Resident, wait: Wait) -> None:
        if resident.retired:
            raise ReplacedError
        if wait.error is not None:
            raise wait.error
        trouble = resident.trouble
        if trouble is not None and self._clock.monotonic() < trouble.until_s and not self._hosting.usable(resident):
            raise trouble.error
