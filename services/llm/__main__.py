"""llm: `python -m services.llm`."""

import sys
import uuid
from collections.abc import Callable

import grpc.aio

from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.channels import open_channel
from services.kit.clock import SystemClock
from services.kit.health import HealthHandle
from services.kit.owner import Owner
from services.kit.permits import PermitClient
from services.kit.run import BAD_SETTINGS, run
from services.kit.server import serve
from services.llm.adapters.model_file import ModelFileError
from services.llm.build import Llm, build
from services.llm.core.lifecycle import State
from services.llm.service import SERVICES, LlmAdminServicer, LlmServicer
from services.llm.settings import LlmSettings


async def main(settings: LlmSettings, owner: Owner) -> None:
    """Start the hosts, serve, drain."""
    health = HealthHandle(serving=False)
    admission = open_channel(settings.admission_address, caller="llm", state_dir=settings.state_dir)
    async with (
        admission,
        PermitClient(admission, service="llm", session_id=uuid.uuid4().hex, owner=owner) as permits,
    ):
        try:
            llm = build(settings, permits, SystemClock(), on_state=lambda state: health.set(state is State.READY))
        except ModelFileError as error:
            sys.stderr.write(f"llm: {error}\n")
            sys.exit(BAD_SETTINGS)
        owner.start(llm.text.supervise(), name="text host")
        owner.start(llm.engine.supervise(), name="engine host")
        servicer = LlmServicer(llm.generator, llm.file, settings)
        await serve(
            name="llm",
            settings=settings,
            listen=settings.listen,
            register=registration(llm, servicer, settings),
            service_names=SERVICES,
            owner=owner,
            on_drain=servicer.drain,
            health=health,
        )


def registration(llm: Llm, servicer: LlmServicer, settings: LlmSettings) -> Callable[[grpc.aio.Server], None]:
    """Return what adds the servicers to a server."""

    def register(server: grpc.aio.Server) -> None:
        llm_pb2_grpc.add_LlmServiceServicer_to_server(servicer, server)
        admin = LlmAdminServicer(llm.generator, servicer, settings)
        llm_pb2_grpc.add_LlmAdminServiceServicer_to_server(admin, server)

    return register


if __name__ == "__main__":
    run(LlmSettings, main)
