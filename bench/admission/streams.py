"""What a permit costs over real gRPC, and whom strict tiers make wait: `python -m bench.admission.streams`.

First: callers of mixed tiers take and give back permits as fast as they can, on few slots, in the ways that the
contract has, against a bare grpc.aio handler that answers the same messages and decides nothing, in the same run and
in a process of the same kind. Exit status 1 when the slots were ever exceeded or a permit is left behind.

Second, an open loop: callers arrive by chance at 1.2 times of what the slots can serve, a fifth of them paid, and the
waits are printed per tier.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import uvloop

from bench.floor import OPTIONS
from bench.measure import abba, ratio, spread
from bench.processes import CHECKOUT, Child, free_ports, stop_children_on_signal
from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc
from services.kit.channels import open_channel
from services.kit.owner import Owner
from services.kit.permits import PermitClient

SLOTS = 4
LOAD = 1.2
PAID_SHARE = 0.2
USE_S = 0.02

Stub = admission_pb2_grpc.AdmissionServiceStub
Side = Callable[[Stub, int, int], Coroutine[Any, Any, None]]
Way = Callable[[grpc.aio.Channel, int, int], Coroutine[Any, Any, None]]
Context = grpc.aio.ServicerContext


# ---- the floor ----------------------------------------------------------------------------------------------------


async def echo_acquire(requests: AsyncIterator[pb.AcquireRequest], context: "Context[Any, Any]") -> None:
    """Grant every message."""
    granted = pb.Granted(permit_id="1-1", units=1, pool="gpu0", tier=pb.TIER_FREE)
    async for _ in requests:
        await context.write(pb.AcquireResponse(granted=granted))


async def echo_session(requests: AsyncIterator[pb.SessionRequest], context: "Context[Any, Any]") -> None:
    """Grant every ask."""
    granted = pb.Granted(permit_id="1-1", units=1, pool="gpu0", tier=pb.TIER_FREE)
    async for request in requests:
        if request.HasField("open"):
            await context.write(pb.SessionResponse(opened=pb.SessionOpened(epoch=1)))
        elif request.HasField("ask"):
            event = pb.SessionEvent(ask_id=request.ask.ask_id, granted=granted)
            await context.write(pb.SessionResponse(event=event))


async def serve_floor(address: str) -> None:
    """Serve the floor until killed."""
    handlers: dict[str, Any] = {
        "Acquire": grpc.stream_stream_rpc_method_handler(
            cast("Any", echo_acquire), pb.AcquireRequest.FromString, pb.AcquireResponse.SerializeToString
        ),
        "Session": grpc.stream_stream_rpc_method_handler(
            cast("Any", echo_session), pb.SessionRequest.FromString, pb.SessionResponse.SerializeToString
        ),
    }
    server = grpc.aio.server(options=OPTIONS)
    service = "omniserve.admission.v1.AdmissionService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


# ---- callers ------------------------------------------------------------------------------------------------------


def ask(number: int) -> pb.Ask:
    """Return the ask of a client: all tiers but background, which would wait for an idle pool."""
    tier = (pb.TIER_PAID, pb.TIER_SUB, pb.TIER_FREE)[number % 3]
    return pb.Ask(modality=pb.MODALITY_LLM, tier=tier, principal=f"p{number}", wait_ms=600_000)


async def by_acquire(stub: Stub, number: int, rounds: int) -> None:
    """Open a stream for every permit."""
    first = pb.AcquireRequest(ask=ask(number))
    for _ in range(rounds):
        call = cast("Any", stub.Acquire)()
        await call.write(first)
        while (await call.read()).WhichOneof("event") != "granted":
            pass
        await call.done_writing()
        await call.code()


async def by_session(stub: Stub, number: int, rounds: int) -> None:
    """Use one stream for all permits of a client."""
    call = cast("Any", stub.Session)()
    await call.write(pb.SessionRequest(open=pb.SessionOpen(session_id=f"s{number}", service="llm")))
    await call.read()
    wanted = ask(number)
    for ask_id in range(rounds):
        await call.write(pb.SessionRequest(ask=pb.SessionAsk(ask_id=ask_id, ask=wanted)))
        while (await call.read()).event.WhichOneof("event") != "granted":
            pass
        await call.write(pb.SessionRequest(release=pb.SessionRelease(ask_id=ask_id)))
    await call.done_writing()
    await call.code()


async def each(side: Side, channel: grpc.aio.Channel, clients: int, rounds: int) -> None:
    """Let every client use streams of its own."""
    stub = admission_pb2_grpc.AdmissionServiceStub(channel)
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(side(cast("Any", stub), number, rounds))


async def together(channel: grpc.aio.Channel, clients: int, rounds: int) -> None:
    """Let all clients share one session, as the requests of an engine service do."""

    async def client(permits: PermitClient, tier: str) -> None:
        for _ in range(rounds):
            async with permits.permit(modality="llm", tier=tier, principal="p", request_id="r", wait_ms=600_000):
                pass

    async with (
        Owner() as owner,
        PermitClient(channel, service="llm", session_id="shared", owner=owner) as permits,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            group.create_task(client(permits, ("paid", "sub", "free")[number % 3]))


WAYS: dict[str, Way] = {
    "one session for all (kit's PermitClient)": together,
    "a session per client": partial(each, by_session),
    "a stream per permit": partial(each, by_acquire),
}


async def burst(way: Way, channel: grpc.aio.Channel, clients: int, rounds: int) -> float:
    """Return permits per second of all clients together."""
    began = time.perf_counter()
    await way(channel, clients, rounds)
    return clients * rounds / (time.perf_counter() - began)


# ---- the two parts ------------------------------------------------------------------------------------------------


@contextmanager
def both(state_dir: Path) -> Iterator[tuple[str, str]]:
    """Run admission and the floor; give their addresses."""
    ours, floor = (f"127.0.0.1:{port}" for port in free_ports(2))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMNISERVE_")},
        "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'protos' / 'gen'}",
        "OMNISERVE_STATE_DIR": str(state_dir),
        "OMNISERVE_ADMISSION_LISTEN": ours,
        "OMNISERVE_ADMISSION_SLOTS": str(SLOTS),
    }
    admission = [sys.executable, "-m", "services.admission"]
    echo = [sys.executable, "-m", "bench.admission.streams", "--serve-floor", floor]
    with (
        Child(admission, environ=environ, log=state_dir / "admission.log", cwd=CHECKOUT),
        Child(echo, environ=environ, log=state_dir / "echo.log", cwd=CHECKOUT),
    ):
        yield ours, floor


async def closed_loop(ours: grpc.aio.Channel, floor: grpc.aio.Channel, arguments: argparse.Namespace) -> None:
    """Print permits per second of both ways, and their ratios to the floor."""
    print(f"slots {SLOTS}, clients {arguments.clients}, permits per client and burst {arguments.rounds}, ", end="")
    print(f"bursts {arguments.bursts}, one client process, who goes first alternates")
    print(f"\n{'way':<42}permits/s           floor/s             ratio to the floor (goal 0.6)")
    for name, way in WAYS.items():
        rates: tuple[list[float], list[float]] = ([], [])
        for index in range(arguments.bursts):
            for which in abba(index):
                rates[which].append(await burst(way, (ours, floor)[which], arguments.clients, arguments.rounds))
        shown = ratio(rates[0], rates[1]).show(2)
        print(f"{name:<42}{spread(rates[0]).show(0):<19} {spread(rates[1]).show(0):<19} {shown}")
    pool = await gpu0(ours)
    print(f"most slots in use at once {pool.max_in_use} of {SLOTS}, longest queue {pool.max_waiting}")
    if pool.max_in_use > SLOTS or pool.in_use:
        sys.exit("the slots were exceeded, or a permit was left behind")


async def gpu0(channel: grpc.aio.Channel) -> pb.PoolStatus:
    """Return the pool's state."""
    stub = cast("Any", admission_pb2_grpc.AdmissionServiceStub(channel))
    answer: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest())
    return next(pool for pool in answer.pools if pool.name == "gpu0")


async def open_loop(ours: grpc.aio.Channel, seconds: float) -> None:
    """Print the waits per tier under overload, through the client that engine services use."""
    chance = random.Random(1)  # noqa: S311 - arrivals of a bench
    waits: dict[str, list[float]] = defaultdict(list)
    arrivals_per_s = LOAD * SLOTS / USE_S

    async with (
        Owner() as owner,
        PermitClient(ours, service="llm", session_id="open", owner=owner) as permits,
        asyncio.TaskGroup() as group,
    ):

        async def caller(tier: str) -> None:
            came = time.perf_counter()
            async with permits.permit(modality="llm", tier=tier, principal="p", request_id="r", wait_ms=600_000):
                waits[tier].append(time.perf_counter() - came)
                await asyncio.sleep(USE_S)

        arrives = time.perf_counter()
        ends = arrives + seconds
        while arrives < ends:
            await asyncio.sleep(max(0.0, arrives - time.perf_counter()))
            group.create_task(caller("paid" if chance.random() < PAID_SHARE else "free"))
            arrives += chance.expovariate(arrivals_per_s)

    print(f"\nopen loop: {LOAD:.0%} of {SLOTS / USE_S:.0f} permits/s for {seconds:g} s, {PAID_SHARE:.0%} paid")
    print("\n".join(waits_by_tier(waits)))


def waits_by_tier(waits: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the table of waits (seconds, by tier) and how much shorter paid's are at the 99th percentile."""
    lines = ["tier   callers   p50 wait ms   p99 wait ms"]
    p99 = {}
    for tier in ("paid", "free"):
        ordered = sorted(waits[tier])
        p50, p99[tier] = (ordered[int(len(ordered) * part)] * 1000 for part in (0.50, 0.99))
        lines.append(f"{tier}   {len(ordered):>7}   {p50:>11.1f}   {p99[tier]:>11.1f}")
    return [*lines, f"p99 of free over p99 of paid: {p99['free'] / p99['paid']:.0f} (goal 20)"]


async def measure(arguments: argparse.Namespace) -> None:
    """Run both parts."""
    with tempfile.TemporaryDirectory() as folder, both(Path(folder)) as (ours, floor):
        state_dir = Path(folder)
        async with (
            open_channel(ours, caller="llm", state_dir=state_dir) as our_channel,
            open_channel(floor, caller="llm", state_dir=state_dir) as floor_channel,
        ):
            await asyncio.wait_for(asyncio.gather(our_channel.channel_ready(), floor_channel.channel_ready()), 30)
            await closed_loop(our_channel, floor_channel, arguments)
            await open_loop(our_channel, arguments.seconds)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=500, help="permits per client and burst")
    parser.add_argument("--bursts", type=int, default=1, help="bursts per way and side")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the open loop")
    parser.add_argument("--serve-floor", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_floor:
        uvloop.run(serve_floor(arguments.serve_floor))
    else:
        stop_children_on_signal()
        uvloop.run(measure(arguments))


if __name__ == "__main__":
    main()
