"""Start vram: read settings and the stored leases, find the devices, serve, drain."""

import secrets
from collections.abc import Callable

import grpc.aio

from omniserve.vram.v1 import vram_pb2_grpc
from services.kit.config import read
from services.kit.owner import Owner
from services.kit.run import run
from services.kit.server import serve
from services.vram.adapters import nvml
from services.vram.adapters.boot import BootClock, boot_id
from services.vram.adapters.driver import Driver, Source
from services.vram.adapters.host_memory import DEVICE, HostMemory
from services.vram.adapters.lease_file import open_file
from services.vram.broker import Broker
from services.vram.core.ledger import Ledger
from services.vram.core.model import Facts, Kind
from services.vram.service import SERVICES, VramAdminServicer, VramServicer
from services.vram.settings import VramSettings
from services.vram.warmer import Warmer

_LEASE_ID_BYTES = 16


def source(settings: VramSettings) -> tuple[Source, Facts]:
    """Return what knows the devices' memory, and the device that is there at least."""
    if settings.devices == "nvml" or (settings.devices == "auto" and nvml.is_here()):
        return nvml.Nvml(), Facts("gpu0", "", Kind.GPU)
    return HostMemory(), Facts(DEVICE, "host memory", Kind.HOST)


async def main(settings: VramSettings, owner: Owner) -> None:
    """Serve until told to stop."""
    clock = BootClock()
    known, first = source(settings)
    driver = Driver(known, clock, [first], limit_s=settings.driver_limit_s)
    reserves = settings.reserves(read(settings.config), first.device)
    file = open_file(
        settings.state_dir / "vram", boot=boot_id(), now=clock.monotonic(), longest_ttl_s=settings.max_ttl_s
    )
    broker = Broker(
        Ledger(driver.devices, settings.rules(reserves), file.past),
        clock,
        file,
        driver,
        owner=owner,
        new_id=lambda: secrets.token_hex(_LEASE_ID_BYTES),
        fresh_s=settings.fresh_s,
        trust_pids=settings.trust_pids,
    )

    host = HostMemory()
    warmer = Warmer(
        host,
        enabled=settings.ram_prefetch_enabled,
        keep_free_percent=settings.ram_keep_free_pct,
        folders=settings.warm_dirs,
    )
    owner.start(warmer.run(), name="weights in the page cache")

    async def drain() -> None:
        broker.drain()

    await serve(
        name="vram",
        settings=settings,
        listen=settings.listen,
        register=registration(VramServicer(broker, reserves, host, warmer), VramAdminServicer(broker)),
        service_names=SERVICES,
        owner=owner,
        on_drain=drain,
    )


def registration(servicer: VramServicer, admin: VramAdminServicer) -> Callable[[grpc.aio.Server], None]:
    """Return what adds the servicers to a server."""

    def register(server: grpc.aio.Server) -> None:
        vram_pb2_grpc.add_VramServiceServicer_to_server(servicer, server)
        vram_pb2_grpc.add_VramAdminServiceServicer_to_server(admin, server)

    return register


if __name__ == "__main__":
    run(VramSettings, main)
