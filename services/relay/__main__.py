"""Start relay: read settings, put them in force, serve, follow changes, drain."""

import asyncio
import os
import signal
from typing import Self

from pydantic import model_validator
from typing_extensions import override

from services.kit.clock import SystemClock
from services.kit.owner import Owner
from services.kit.run import run
from services.kit.server import serve
from services.relay.adapters.door import read_door
from services.relay.adapters.former import FormerInputs
from services.relay.adapters.free_memory import FreeMemory
from services.relay.adapters.judge import EnvoyVersion
from services.relay.adapters.xds_files import XdsFiles
from services.relay.api import open_api
from services.relay.control import Control
from services.relay.live import LiveEndpoints
from services.relay.service import SERVICES
from services.relay.settings import RelaySettings


class Settings(RelaySettings):
    """The settings of the process. Unlike the launcher it does not end over what upstreams are: see Control.begin."""

    @model_validator(mode="after")
    @override
    def _can_be_used(self) -> Self:
        return self


async def main(settings: RelaySettings, owner: Owner) -> None:
    """Serve until told to stop. Envoy keeps what is in force then."""
    clock, environ = SystemClock(), dict(os.environ)
    live = LiveEndpoints(clock, FreeMemory())
    files = XdsFiles(settings.state_dir.resolve() / "xds")
    door = read_door(settings.state_dir)
    former = FormerInputs(settings.state_dir / "relay.json")
    control = Control(settings, door, files, former, clock, environ=environ, live=live.applied)
    await control.begin()
    owner.start(control.run(), name="the owner of Envoy's configuration")
    owner.start(live.run(control), name="the owner of live endpoints")
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, control.poke)
    version = EnvoyVersion(door.envoy)
    async with open_api(settings, control, live, clock, environ=environ, envoy_version=version) as api:
        await serve(
            name="relay",
            settings=settings,
            listen=settings.listen,
            register=api.register,
            service_names=SERVICES,
            owner=owner,
            on_drain=api.drain,
        )


if __name__ == "__main__":
    run(Settings, main)
