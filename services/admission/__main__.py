"""Start admission: read settings, remember the past, serve, drain."""

from collections.abc import Callable

import grpc.aio

from omniserve.admission.v1 import admission_pb2_grpc
from services.admission.adapters.memory_file import MemoryFile
from services.admission.core.desk import Desk
from services.admission.core.scheduler import Scheduler
from services.admission.keeper import Keeper
from services.admission.service import SERVICES, AdmissionAdminServicer, AdmissionServicer
from services.admission.settings import AdmissionSettings
from services.kit.clock import Clock, SystemClock
from services.kit.owner import Owner
from services.kit.permits import identity_in
from services.kit.processes import is_dead
from services.kit.run import run
from services.kit.server import serve


def build(settings: AdmissionSettings, clock: Clock) -> Keeper:
    """Return the keeper of a new epoch that remembers the process before."""
    now = clock.monotonic()
    memory = MemoryFile(settings.state_dir / "admission.json", ahead_s=clock.wall() - now)
    epoch, past = memory.read()
    desk = Desk(
        Scheduler(settings.pools(), settings.rules()),
        epoch=epoch + 1,
        past=past,
        grace_s=settings.session_grace_s,
        settle_s=settings.settle_s,
        now=now,
    )
    memory.write(desk.epoch, desk.memory())
    return Keeper(desk, clock, memory, is_dead=lambda session_id: is_dead(identity_in(session_id)))


def registration(keeper: Keeper, settings: AdmissionSettings) -> Callable[[grpc.aio.Server], None]:
    """Return what adds the servicers to a server."""

    def register(server: grpc.aio.Server) -> None:
        servicer = AdmissionServicer(keeper, settings.intake(), grace_s=settings.session_grace_s)
        admission_pb2_grpc.add_AdmissionServiceServicer_to_server(servicer, server)
        admission_pb2_grpc.add_AdmissionAdminServiceServicer_to_server(AdmissionAdminServicer(keeper), server)

    return register


async def main(settings: AdmissionSettings, owner: Owner) -> None:
    """Serve until told to stop."""
    keeper = build(settings, SystemClock())
    owner.start(keeper.run(), name="the desk's timer")

    async def drain() -> None:
        keeper.drain()

    await serve(
        name="admission",
        settings=settings,
        listen=settings.listen,
        register=registration(keeper, settings),
        service_names=SERVICES,
        owner=owner,
        on_drain=drain,
    )


if __name__ == "__main__":
    run(AdmissionSettings, main)
