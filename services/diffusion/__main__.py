"""diffusion: `python -m services.diffusion`."""

import asyncio
import os
import signal
import uuid
from contextlib import AsyncExitStack

import grpc.aio

from omniserve.diffusion.v1 import diffusion_pb2_grpc
from services.diffusion.admin import DiffusionAdminServicer
from services.diffusion.build import build
from services.diffusion.service import SERVICES, DiffusionServicer
from services.diffusion.settings import DiffusionSettings
from services.kit.channels import open_channel
from services.kit.clock import SystemClock
from services.kit.health import HealthHandle
from services.kit.hosts.broker import Broker
from services.kit.hosts.coordinators import open_coordinators
from services.kit.hosts.footprints import Footprints
from services.kit.hosts.leased import BrokerLeases
from services.kit.hosts.leases import Leases, OwnBudget
from services.kit.owner import Owner
from services.kit.permits import PermitClient
from services.kit.run import run
from services.kit.server import serve


async def main(settings: DiffusionSettings, owner: Owner) -> None:
    """Look at the models, serve, drain."""
    health = HealthHandle(serving=False)
    admission = open_channel(settings.admission_address, caller="diffusion", state_dir=settings.state_dir)
    async with (
        admission,
        PermitClient(admission, service="diffusion", session_id=uuid.uuid4().hex, owner=owner) as permits,
        AsyncExitStack() as stack,
    ):
        coordinators = await stack.enter_async_context(
            open_coordinators(
                settings.coordinators, wait_s=settings.coordinator_timeout_s, load_s=settings.load_timeout_s
            )
        )
        diffusion = build(
            settings,
            permits,
            SystemClock(),
            owner,
            leases=await leases_of(settings, stack, owner),
            coordinators=coordinators,
            on_health=health.set,
        )
        stack.push_async_callback(diffusion.hosting.close)  # while the broker can still be told
        owner.start(diffusion.hosting.run(), name="what is in memory")
        owner.start(diffusion.catalogue.follow(), name="the models of the file")
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, diffusion.catalogue.poke)
        servicer = DiffusionServicer(
            diffusion.generator,
            diffusion.upscaler,
            diffusion.operations,
            variation_strength=settings.variation_strength,
        )
        admin = DiffusionAdminServicer(diffusion.operations, owner, unload_wait_s=settings.unload_wait_s)

        def register(server: grpc.aio.Server) -> None:
            diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(servicer, server)
            diffusion_pb2_grpc.add_DiffusionAdminServiceServicer_to_server(admin, server)

        await serve(
            name="diffusion",
            settings=settings,
            listen=settings.listen,
            register=register,
            service_names=SERVICES,
            owner=owner,
            on_drain=servicer.drain,
            health=health,
        )


async def leases_of(settings: DiffusionSettings, stack: AsyncExitStack, owner: Owner) -> Leases:
    """Return where the memory of models comes from; `stack` closes what that needs."""
    if not settings.lease_memory:
        return OwnBudget()
    channel = await stack.enter_async_context(
        open_channel(settings.vram_address, caller="diffusion", state_dir=settings.state_dir)
    )
    broker = Broker(
        channel,
        SystemClock(),
        owner,
        tenant=settings.lease_tenant,
        pid=os.getpid(),
        patience_s=settings.load_wait_s,
    )
    return BrokerLeases(broker, Footprints(settings.state_dir / "diffusion"), owner, device=settings.lease_device)


if __name__ == "__main__":
    run(DiffusionSettings, main)
