"""llm: `python -m services.llm`."""

import asyncio
import os
import signal
import sys
import uuid
from contextlib import AsyncExitStack

import grpc.aio

from omniserve.llm.v1 import llm_pb2_grpc
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
from services.kit.run import BAD_SETTINGS, run
from services.kit.server import serve
from services.llm.adapters.model_file import ModelFileError
from services.llm.admin import LlmAdminServicer
from services.llm.build import build
from services.llm.service import SERVICES, LlmServicer
from services.llm.settings import LlmSettings


async def main(settings: LlmSettings, owner: Owner) -> None:
    """Start the hosts, serve, drain."""
    health = HealthHandle(serving=False)
    admission = open_channel(settings.admission_address, caller="llm", state_dir=settings.state_dir)
    async with (
        admission,
        PermitClient(admission, service="llm", session_id=uuid.uuid4().hex, owner=owner) as permits,
        AsyncExitStack() as stack,
    ):
        leases = await leases_of(settings, stack, owner)
        coordinators = await stack.enter_async_context(
            open_coordinators(
                settings.coordinators, wait_s=settings.coordinator_timeout_s, load_s=settings.load_timeout_s
            )
        )
        try:
            llm = build(
                settings,
                permits,
                SystemClock(),
                owner,
                leases=leases,
                coordinators=coordinators,
                on_health=health.set,
            )
        except ModelFileError as error:
            sys.stderr.write(f"llm: {error}\n")
            sys.exit(BAD_SETTINGS)
        stack.push_async_callback(llm.hosting.close)  # while the broker can still be told
        owner.start(llm.hosting.run(), name="what is in memory")
        owner.start(llm.catalogue.follow(), name="the models of the file")
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, llm.catalogue.poke)
        servicer = LlmServicer(llm.generator, llm.embeddings)
        admin = LlmAdminServicer(llm.residents, llm.operations, settings, owner)

        def register(server: grpc.aio.Server) -> None:
            llm_pb2_grpc.add_LlmServiceServicer_to_server(servicer, server)
            llm_pb2_grpc.add_LlmAdminServiceServicer_to_server(admin, server)

        await serve(
            name="llm",
            settings=settings,
            listen=settings.listen,
            register=register,
            service_names=SERVICES,
            owner=owner,
            on_drain=servicer.drain,
            health=health,
        )


async def leases_of(settings: LlmSettings, stack: AsyncExitStack, owner: Owner) -> Leases:
    """Return where the memory of models comes from; `stack` closes what that needs."""
    if not settings.lease_memory:
        return OwnBudget()
    channel = await stack.enter_async_context(
        open_channel(settings.vram_address, caller="llm", state_dir=settings.state_dir)
    )
    broker = Broker(
        channel,
        SystemClock(),
        owner,
        tenant=settings.lease_tenant,
        pid=os.getpid(),
        patience_s=settings.load_wait_s,
    )
    return BrokerLeases(broker, Footprints(settings.state_dir / "llm"), owner, device=settings.lease_device)


if __name__ == "__main__":
    run(LlmSettings, main)
