"""Start relay: read settings, put them in force, serve, follow changes, drain."""

import asyncio
import os
import signal

import grpc.aio

from services.kit import telemetry
from services.kit.clock import SystemClock
from services.kit.owner import Owner
from services.kit.run import run
from services.kit.server import serve
from services.relay.adapters.door import read_door
from services.relay.adapters.xds_files import XdsFiles
from services.relay.control import Control
from services.relay.settings import RelaySettings

_log = telemetry.logger(__name__)


async def main(settings: RelaySettings, owner: Owner) -> None:
    """Serve until told to stop. Envoy keeps what is in force then."""
    files = XdsFiles(settings.state_dir.resolve() / "xds")
    control = Control(settings, read_door(settings.state_dir), files, SystemClock(), environ=os.environ)
    await control.begin()
    owner.start(control.run(), name="the owner of Envoy's configuration")
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, control.poke)

    def register(server: grpc.aio.Server) -> None:
        pass

    await serve(
        name="relay",
        settings=settings,
        listen=settings.listen,
        register=register,
        service_names=(),
        owner=owner,
    )


if __name__ == "__main__":
    run(RelaySettings, main)
