"""Wires relay's gRPC API: the servicers with the counters and connections that they need."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from omniserve.relay.v1 import relay_pb2_grpc
from services.kit.clock import Clock
from services.kit.tokens import ensure_token
from services.relay.adapters.envoy_stats import EnvoyStats
from services.relay.adapters.forward import Forwarder
from services.relay.adapters.judge import EnvoyVersion
from services.relay.control import Control
from services.relay.live import LiveEndpoints
from services.relay.service import RelayAdminServicer, RelayServicer
from services.relay.settings import RelaySettings


@dataclass(frozen=True, slots=True)
class Api:
    """Both servicers."""

    relay: RelayServicer
    admin: RelayAdminServicer

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers to a server."""
        relay_pb2_grpc.add_RelayServiceServicer_to_server(self.relay, server)
        relay_pb2_grpc.add_RelayAdminServiceServicer_to_server(self.admin, server)

    async def drain(self) -> None:
        """Take nothing new that would end with this process."""
        self.relay.drain()


@asynccontextmanager
async def open_api(
    settings: RelaySettings,
    control: Control,
    live: LiveEndpoints,
    clock: Clock,
    *,
    environ: Mapping[str, str],
    envoy_version: EnvoyVersion,
) -> AsyncIterator[Api]:
    """Give the API for the length of a block; its connections are closed at the end. `environ` has credentials."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every URL, and with it callers' queries
    stats = EnvoyStats(settings.edge_address, clock, interval_s=settings.stats_interval_s)
    forwarder = Forwarder(settings.mesh_listener, ensure_token(settings.state_dir, "relay"))
    try:
        yield Api(
            RelayServicer(
                control,
                live,
                stats,
                forwarder,
                clock,
                default_ttl_s=settings.endpoint_ttl_s,
                envoy_version=envoy_version,
            ),
            RelayAdminServicer(control, live, stats, settings, clock, environ=environ),
        )
    finally:
        await stats.close()
        await forwarder.close()
