"""Tokens per second of the whole mesh against `llama-server` built from the same llama.cpp, in interleaved rounds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.llm import peer
from bench.llm.load import LoadProcess
from bench.llm.mesh import Mesh, start_mesh
from bench.llm.report import compare, progress, result, tables
from bench.llm.rounds import BenchError, Plan, Sample, measure, run_rounds
from bench.llm.sides import PEER_NAME, Peer, Side, add_shape, shape_of, start_peer
from bench.processes import CHECKOUT, stop_children_on_signal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

RESULTS = CHECKOUT / "build" / "bench"
PEER_AGAIN = f"{PEER_NAME}-again"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_shape(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="concurrent streams")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds per number of streams and start")
    parser.add_argument(
        "--starts",
        type=int,
        default=3,
        help="how often both sides are started anew: one process may compute at another speed than the next, for its whole life",
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every stream")
    parser.add_argument(
        "--wait-for-calm",
        type=float,
        default=15.0,
        help="longest wait before a round for other programs to rest, seconds",
    )
    parser.add_argument(
        "--null", action="store_true", help="llama-server against itself: what the method cannot tell apart"
    )
    parser.add_argument("--peer", type=Path, help="a llama-server to use instead of building one")
    parser.add_argument(
        "--peer-arg", action="append", default=[], help="further argument of llama-server (--peer-arg=--flag)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "llm.json", help="result file")
    return parser.parse_args(argv)


def environment(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """State what a reader needs to judge the numbers."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    return {
        "slots": options.slots,
        "threads": options.threads,
        "context_tokens": options.context,
        "streams": options.streams,
        "rounds": options.rounds,
        "starts": options.starts,
        "tokens_per_stream": options.tokens,
        "gguf": options.gguf.name,
        "sampling": "greedy, ignore_eos; llama-server with its shortest sampler chain",
        "prefix_cache": "off on both sides, prompts differ from their first word on",
        "llama_cpp_python": metadata.version(peer.DISTRIBUTION),
        "peer_arguments": options.peer_arg,
        "omp": {name: value for name, value in environ.items() if name.startswith(("OMP_", "GOMP_"))},
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def start_sides(
    options: argparse.Namespace, server: Path, folder: Path, stack: contextlib.ExitStack
) -> tuple[Side, Side]:
    """Both servers, ready; `stack` ends them."""
    shape = shape_of(options)

    def new_peer(name: str) -> Peer:
        child, port = start_peer(server, shape, environ=os.environ, log=folder / f"{name}.log", extra=options.peer_arg)
        stack.callback(child.stop)
        return Peer(child, port, name)

    if options.null:
        return new_peer(PEER_NAME), new_peer(PEER_AGAIN)
    mesh: Mesh = stack.enter_context(start_mesh(shape, environ=os.environ, folder=folder))
    return mesh, new_peer(PEER_NAME)


def run(options: argparse.Namespace) -> list[Sample]:
    """Measure, print the tables, write the result file."""
    server = options.peer or peer.build(peer.installed_version(), jobs=os.cpu_count() or 1)
    facts = environment(options, os.environ)
    samples: list[Sample] = []
    names = (PEER_NAME, PEER_AGAIN) if options.null else (Mesh.name, PEER_NAME)
    print(
        f"{names[0]} against {names[1]}: {options.slots} slots and {options.threads} threads on both sides, {options.gguf.name}, "
        f"{options.tokens} tokens a stream, {options.starts} starts of {options.rounds} rounds, greedy, no warm prefixes\n",
        flush=True,
    )
    for start in range(options.starts):
        for sample in run_start(options, server, range(start * options.rounds, (start + 1) * options.rounds)):
            samples.append(sample)
            print(progress(sample), file=sys.stderr, flush=True)
    comparisons = compare(samples, names)
    print(tables(comparisons, names))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result(facts, comparisons, samples), indent=2) + "\n")
    print(f"\nwritten to {options.out}")
    return samples


def run_start(options: argparse.Namespace, server: Path, rounds: range) -> Iterator[Sample]:
    """Start both sides, warm them, and measure some rounds at every number of streams."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniserve-bench-")))
        sides = start_sides(options, server, folder, stack)
        load = stack.enter_context(LoadProcess())
        for side in sides:
            measure(load, side, Plan(tokens=16), concurrency=max(options.streams), round_index=rounds.stop)
        for concurrency in options.streams:
            plan = Plan(tokens=options.tokens, calm_limit_s=options.wait_for_calm)
            yield from run_rounds(load, sides, plan, concurrency=concurrency, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 1 when the sides cannot be compared."""
    stop_children_on_signal()
    try:
        run(arguments(argv))
    except (BenchError, peer.PeerError) as error:
        print(f"bench.llm.run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
