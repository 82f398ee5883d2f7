"""Other processes begin nothing while a model is loaded, and go on as soon as it is, or is not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.kit.hosts.coordinators import Coordinators, NotHeldError
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.leases import NoRoomError
from services.kit.hosts.resident import Resident
from services.kit.owner import Owner


class HandOver:
    """Asks the coordinators for each load."""

    def __init__(self, coordinators: Coordinators, owner: Owner) -> None:
        self._coordinators = coordinators
        self._owner = owner

    @asynccontextmanager
    async def holding(self, resident: Resident[Any]) -> AsyncIterator[None]:
        """Let nobody begin anything until a model is loaded, or the block ends. Raises NoRoomError when one does not hold."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        handing = self._owner.start(self._until_loaded(resident, answer), name=f"hand-over for {resident.name}")
        try:
            await answer
            yield
        finally:
            handing.cancel()
            await asyncio.wait([handing])

    async def _until_loaded(self, resident: Resident[Any], answer: "asyncio.Future[None]") -> None:
        try:
            async with self._coordinators.holding():
                _tell(answer, None)
                while resident.host.report.state is not State.READY:
                    await resident.changed.wait()
        except NotHeldError as error:
            _tell(answer, NoRoomError(str(error), None))


def _tell(answer: "asyncio.Future[None]", error: NoRoomError | None) -> None:
    if answer.done():
        return  # nobody waits for it any more
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
