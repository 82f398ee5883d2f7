"""What a lease costs over gRPC: `python -m bench.vram.run`.

Clients lease, renew and release as fast as they can, against a bare grpc.aio handler that answers the same messages and
decides nothing, in the same run and in a process of the same kind. Exit status 1 when a lease is left behind or an ask
was denied, which the sizes leave no reason for.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import uvloop

from bench.floor import OPTIONS
from bench.measure import abba, ratio, spread
from bench.processes import CHECKOUT, Child, free_ports, stop_children_on_signal
from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from services.kit.channels import open_channel

GOAL = 0.8
CALLS_PER_ROUND = 3
SERVICE = "omniserve.vram.v1.VramService"

Context = grpc.aio.ServicerContext


# ---- the floor ----------------------------------------------------------------------------------------------------


LEASED = pb.LeaseResponse(
    granted=True,
    lease_id="0" * 32,
    items=[pb.LeasedItem(device="cpu", size_mib=1)],
    ttl_s=120,
    headroom_mib={"cpu": 10_000},
)
RENEWED = pb.RenewResponse(
    lease=pb.LeaseState(
        lease_id="0" * 32,
        tenant="tenant0",
        items=[pb.LeasedItem(device="cpu", size_mib=1)],
        ttl_s=120,
        remaining_ms=120_000,
        age_ms=1,
        renewals=1,
    ),
    headroom_mib={"cpu": 10_000},
)


async def echo_lease(_request: pb.LeaseRequest, _context: "Context[Any, Any]") -> pb.LeaseResponse:
    """Grant everything."""
    return LEASED


async def echo_renew(_request: pb.RenewRequest, _context: "Context[Any, Any]") -> pb.RenewResponse:
    """Renew everything."""
    return RENEWED


async def echo_release(_request: pb.ReleaseRequest, _context: "Context[Any, Any]") -> pb.ReleaseResponse:
    """Release everything."""
    return pb.ReleaseResponse(released=True)


async def serve_floor(address: str) -> None:
    """Serve the floor until killed."""
    kinds = (
        ("Lease", echo_lease, pb.LeaseRequest),
        ("Renew", echo_renew, pb.RenewRequest),
        ("Release", echo_release, pb.ReleaseRequest),
    )
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(
            cast("Any", handler), request.FromString, lambda message: message.SerializeToString()
        )
        for name, handler, request in kinds
    }
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


# ---- the load -----------------------------------------------------------------------------------------------------


async def tenant(stub: Any, name: str, rounds: int) -> int:  # noqa: ANN401 - a stub, of either side
    """Lease, renew and release; return how many asks were denied."""
    ask = pb.LeaseRequest(tenant=name, items=[pb.LeaseItem(device="cpu", size_mib=1)])
    denied = 0
    for _ in range(rounds):
        lease = await stub.Lease(ask)
        if not lease.granted:
            denied += 1
            continue
        await stub.Renew(pb.RenewRequest(lease_id=lease.lease_id))
        await stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))
    return denied


async def burst(channel: grpc.aio.Channel, clients: int, rounds: int) -> tuple[float, int]:
    """Return calls per second of all clients together, and denials."""
    stub = vram_pb2_grpc.VramServiceStub(channel)
    began = time.perf_counter()
    denied = await asyncio.gather(*(tenant(stub, f"tenant{number}", rounds) for number in range(clients)))
    return CALLS_PER_ROUND * clients * rounds / (time.perf_counter() - began), sum(denied)


@contextmanager
def both(state_dir: Path) -> Iterator[tuple[str, str]]:
    """Run vram and the floor; give their addresses."""
    ours, floor = (f"127.0.0.1:{port}" for port in free_ports(2))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMNISERVE_")},
        "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'protos' / 'gen'}",
        "OMNISERVE_STATE_DIR": str(state_dir),
        "OMNISERVE_VRAM_LISTEN": ours,
        "OMNISERVE_VRAM_DEVICES": "host",
    }
    vram = [sys.executable, "-m", "services.vram"]
    echo = [sys.executable, "-m", "bench.vram.run", "--serve-floor", floor]
    with (
        Child(vram, environ=environ, log=state_dir / "vram.log", cwd=CHECKOUT),
        Child(echo, environ=environ, log=state_dir / "echo.log", cwd=CHECKOUT),
    ):
        yield ours, floor


async def measure(arguments: argparse.Namespace) -> None:
    """Print calls per second of both sides, and their ratio."""
    with tempfile.TemporaryDirectory() as folder, both(Path(folder)) as (ours, floor):
        async with (
            open_channel(ours, caller="llm", state_dir=Path(folder)) as our_channel,
            open_channel(floor, caller="llm", state_dir=Path(folder)) as floor_channel,
        ):
            channels = (our_channel, floor_channel)
            await asyncio.wait_for(asyncio.gather(*(each.channel_ready() for each in channels)), 60)
            for channel in channels:
                await burst(channel, arguments.clients, 20)
            rates: tuple[list[float], list[float]] = ([], [])
            denied = 0
            for index in range(arguments.bursts):
                for which in abba(index):
                    rate, refused = await burst(channels[which], arguments.clients, arguments.rounds)
                    rates[which].append(rate)
                    denied += refused
            state = await cast("Any", vram_pb2_grpc.VramServiceStub(our_channel)).GetState(pb.GetStateRequest())
    print(f"clients {arguments.clients}, lease-renew-release rounds per client and burst {arguments.rounds}, ", end="")
    print(f"bursts {arguments.bursts}, one client process, who goes first alternates")
    print(f"\n{'calls/s':<24}floor/s                 ratio to the floor (goal {GOAL})")
    print(f"{spread(rates[0]).show(0):<24}{spread(rates[1]).show(0):<24}{ratio(rates[0], rates[1]).show(2)}")
    print(f"denied {denied}, leases left {len(state.leases)}, granted {state.counters.granted_total}")
    if denied or state.leases:
        sys.exit("an ask was denied, or a lease was left behind")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=50, help="rounds per client and burst")
    parser.add_argument("--bursts", type=int, default=7, help="bursts per side")
    parser.add_argument("--serve-floor", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_floor:
        uvloop.run(serve_floor(arguments.serve_floor))
    else:
        stop_children_on_signal()
        uvloop.run(measure(arguments))


if __name__ == "__main__":
    main()
