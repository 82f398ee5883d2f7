"""What the front door costs for each proxied request, and what others cost: `python -m bench.transport.run`.

One worker that answers at once, and one request, a small chat. It is asked for without a proxy, through an Envoy that only
relays, through the mesh's front door without keys and with a key in every request (what `make run` starts: Envoy with all
its filters, its access log and traces, relay, and admission, which gives a permit for each request), and through the
peers, where peer.py has installed them: LiteLLM's proxy and the least relay in Python. All of them run at the same time
and are asked in turn, round by round, by a load generator in C.

Last, server-sent events: what admission spends on streams of one event and of fifty.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import there_and_back
from bench.processes import stop_children_on_signal
from bench.transport import peer, report, streams
from bench.transport.front_door import SLOTS, TRACED_PERCENT
from bench.transport.sides import ENVOY_THREADS, Side, Starter, build_load
from bench.transport.sink import sink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.transport.report import Burst, Name

CONNECTIONS = 32
WARM_S = 1.0


def measure(
    sides: Sequence[Side], load: Path, connections: int, rounds: int, seconds: float
) -> dict[Name, list[Burst]]:
    """Ask every side once a round; who goes first and who last alternates."""
    seen: dict[Name, list[Burst]] = {side.name: [] for side in sides}
    for side in sides:
        side.burst(load, connections, WARM_S)
    for index in range(rounds):
        for which in there_and_back(index, len(sides)):
            seen[sides[which].name].append(sides[which].burst(load, connections, seconds))
    return seen


def print_shape(peers: Path | None) -> None:
    """Say what the numbers depend on."""
    cores = os.cpu_count()
    print(f"{cores} cores; slots {SLOTS}; Envoys with {ENVOY_THREADS} threads, the worker with one; ", end="")
    print(f"access log on, {TRACED_PERCENT:g} % of requests traced")
    if peers is None:
        print("without LiteLLM and the Python relay: `python -m bench.transport.peer` installs them")
    else:
        print(f"LiteLLM {peer.VERSION}: {cores} workers, no database, no key; Python relay: {cores} processes")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a burst")
    parser.add_argument("--streams", type=int, default=100, help="streams per burst; 0 leaves them out")
    parser.add_argument("--no-peers", action="store_true", help="leave LiteLLM and the Python relay out")
    arguments = parser.parse_args()
    stop_children_on_signal()
    peers = None if arguments.no_peers else peer.installed()
    print_shape(peers)
    with tempfile.TemporaryDirectory(prefix="omniserve-bench-") as folder, ExitStack() as stack:
        spans, collector = stack.enter_context(sink())
        sides = Starter(stack, Path(folder), collector).all(peers)
        load = build_load(Path(folder))
        bursts = {}
        for connections in (CONNECTIONS, 1):
            many = "connection" if connections == 1 else "connections"
            print(f"\n{connections} {many}, {arguments.rounds} rounds of {arguments.seconds:g} s", flush=True)
            bursts[connections] = measure(sides.all, load, connections, arguments.rounds, arguments.seconds)
            print("\n".join(report.table(bursts[connections])))
            if connections == 1:
                print("\n".join(report.added(bursts[1], bursts[CONNECTIONS])), flush=True)
            else:
                print("\n".join([*report.ratios(bursts[connections]), report.bottlenecks(bursts[connections])]))
        print(f"spans exported meanwhile: {spans.spans}")
        if arguments.streams:
            print("\n" + "\n".join(streams.measure(sides.gated, arguments.streams)))


if __name__ == "__main__":
    main()
