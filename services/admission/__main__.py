"""Start admission: read settings, remember the past, serve, drain."""

from collections.abc import Callable
from functools import partial

import grpc.aio

from omniserve.admission.v1 import admission_pb2_grpc
from services.admission import authorize, gate
from services.admission.adapters import gauges
from services.admission.adapters.keys import KeyFiles
from services.admission.adapters.memory_file import MemoryFile
from services.admission.authorize import Authorizer
from services.admission.core.desk import Desk
from services.admission.core.scheduler import Scheduler
from services.admission.gate import Gate
from services.admission.keeper import Keeper
from services.admission.past import count_the_past, watch_the_lost
from services.admission.service import SERVICES, AdmissionAdminServicer, AdmissionServicer
from services.admission.settings import AdmissionSettings
from services.kit.clock import Clock, SystemClock
from services.kit.keyring import keyring_path
from services.kit.owner import Owner
from services.kit.permits import identity_in
from services.kit.processes import is_dead
from services.kit.run import run
from services.kit.server import serve
from services.kit.tokens import TokenBook
from services.kit.wire.callouts import Callouts, beside, check_tokens, open_callouts, unary


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


def key_files(settings: AdmissionSettings) -> KeyFiles:
    """Return the keys in force. Raises KeyringError and ConfigError."""
    return KeyFiles(
        keyring_path=keyring_path(settings.state_dir),
        config_path=settings.config,
        secret=settings.secret.get_secret_value(),
    )


async def main(settings: AdmissionSettings, owner: Owner) -> None:
    """Serve until told to stop."""
    clock = SystemClock()
    keeper = build(settings, clock)
    owner.start(keeper.run(), name="the desk's timer")
    keys = key_files(settings)
    owner.start(keys.watch(), name="the watch over keys")
    tokens = TokenBook(settings.state_dir)
    authorizer = Authorizer(keys, tokens, settings.policy(), clock.wall)
    the_gate = Gate(keeper, settings.intake())
    read_gauges = partial(gauges.read, settings.edge_address)

    async def drain() -> None:
        keeper.drain()
        the_gate.drain(callouts)

    check = check_tokens((gate.SERVICE, authorize.SERVICE), tokens if settings.check_tokens else None)
    callouts = Callouts({**the_gate.openers(), f"/{authorize.SERVICE}/Check": unary(authorizer.answer)}, check)
    owner.start(callouts.run(), name="the watch over Envoy's connections")
    let_in = partial(the_gate.let_in, callouts)
    owner.start(count_the_past(keeper, read_gauges, let_in), name="the count of the past")
    owner.start(watch_the_lost(the_gate, callouts, read_gauges), name="the watch over lost exchanges")
    async with open_callouts(settings.checks_listen or beside(settings.listen), callouts):
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
