"""What a permit for every proxied request costs: `python -m bench.transport.run`.

One Envoy with two doors to the same worker, another Envoy that answers at once: through `plain` Envoy only relays, through
`public` it asks a real admission process for every request, takes the internal listener, writes an access log. Both doors
are measured in turn, round by round, by a load generator in C (load.c, built with the system's compiler).

Then server-sent events: the same number of streams with one event each and with fifty, and what admission spends on one:
CPU time, and how often its event loop wakes up. Chunks do not pass it, so they must not wake it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Spread, abba, ratio, spread
from bench.processes import CHECKOUT, Child, cpu_seconds, free_ports, stop_children_on_signal
from bench.transport.edge import TOKEN_VARIABLE, Ports, Route, answering, configuration
from services.kit.tokens import ensure_token

READY_S = 60.0
SLOTS = 4096
"""More than ever run at once: what is measured is the gate, not a queue."""
EVENTS = 50
STREAMS_AT_ONCE = 10
SSE_ROUNDS = 4
ROUTES = (
    Route("/sse", "events", "route=events;upstream=events;modality=llm"),
    Route("/", "worker", "route=worker;upstream=worker;modality=llm"),
)


@dataclass(frozen=True, slots=True)
class Burst:
    """What one run of the load generator saw, and the CPU seconds of Envoy and admission meanwhile."""

    requests: int
    seconds: float
    p50_us: int
    p99_us: int
    envoy_s: float
    admission_s: float

    @property
    def per_second(self) -> float:
        """Requests answered per second."""
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """What runs."""

    load: Path
    ports: Ports
    envoy: int
    admission: int

    def burst(self, port: int, connections: int, seconds: float) -> Burst:
        """Ask on some connections for some seconds. Raises RuntimeError when an answer was not 200."""
        before = cpu_seconds(self.envoy), cpu_seconds(self.admission)
        command = [str(self.load), str(port), "/json", str(connections), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30, check=False)
        if done.returncode:
            raise RuntimeError(f"the load generator failed: {done.stderr}")
        answers, bad, took, _, p50, _, p99 = done.stdout.split()
        if int(bad):
            raise RuntimeError(f"{bad} of {answers} answers were not 200")
        after = cpu_seconds(self.envoy), cpu_seconds(self.admission)
        spent = [end - begin for begin, end in zip(before, after, strict=True)]
        return Burst(int(answers), float(took), int(p50), int(p99), *spent)

    def streams(self, events: int, count: int) -> tuple[float, float]:
        """Read so many streams; return admission's CPU microseconds and its event loop's wake-ups, per stream."""
        before = scheduled_seconds(self.admission), wakeups(self.admission)
        with ThreadPoolExecutor(STREAMS_AT_ONCE) as pool:
            list(pool.map(self._stream, [events] * count))
        after = scheduled_seconds(self.admission), wakeups(self.admission)
        return (after[0] - before[0]) / count * 1e6, (after[1] - before[1]) / count

    def _stream(self, events: int) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports.public}/sse", headers={"x-do": f"sse?chunks={events}&delay_ms=1"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own address
            if not answer.read().endswith(b"data: [DONE]\n\n"):
                raise RuntimeError("a stream was cut")


def scheduled_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far, to the nanosecond."""
    stats = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(fields[0]) for fields in stats) / 1e9


def wakeups(pid: int) -> int:
    """Return how often a process's main thread has gone to sleep so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def build(folder: Path) -> Path:
    """Compile the load generator."""
    program = folder / "load"
    source = Path(__file__).with_name("load.c")
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(program), str(source)], check=True, timeout=60)
    return program


def start(stack: ExitStack, folder: Path) -> Bench:
    """Start the workers, admission and Envoy, and wait until a request passes both doors."""
    listen, checks, worker, worker_admin, events, *four = free_ports(9)
    ports = Ports(*four)
    address = f"127.0.0.1:{checks}"
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))},
        "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'protos' / 'gen'}",
        TOKEN_VARIABLE: ensure_token(folder, "envoy"),
        "OMNISERVE_STATE_DIR": str(folder),
        "OMNISERVE_ADMISSION_LISTEN": f"127.0.0.1:{listen}",
        "OMNISERVE_ADMISSION_CHECKS_LISTEN": address,
        "OMNISERVE_EDGE_ADDRESS": f"127.0.0.1:{ports.operator}",
        "OMNISERVE_SLOTS": str(SLOTS),
    }

    def run(name: str, *command: str) -> int:
        child = Child(command, environ=environ, log=folder / f"{name}.log", cwd=CHECKOUT)
        return stack.enter_context(child).pid

    def run_envoy(name: str, config: dict[str, Any], threads: int) -> int:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        binary = str(Path(sys.executable).with_name("envoy"))
        options = ("--concurrency", str(threads), "-l", "error", "--use-dynamic-base-id")
        return run(name, binary, "-c", str(path), *options)

    run_envoy("worker", answering(worker, worker_admin), 1)
    script = CHECKOUT / "tests" / "fixtures" / "worker_process.py"
    run("events", sys.executable, str(script), "--journal", str(folder / "events.jsonl"), f"events={events}")
    admission = run("admission", sys.executable, "-m", "services.admission")
    workers = {"worker": worker, "events": events}
    log = str(folder / "access.log")
    envoy = run_envoy(
        "envoy", configuration(ports, admission=address, workers=workers, routes=ROUTES, access_log=log), 2
    )
    for port in (ports.public, ports.plain):
        wait_for(f"http://127.0.0.1:{port}/json")
        wait_for(f"http://127.0.0.1:{port}/sse")
    return Bench(build(folder), ports, envoy, admission)


def wait_for(url: str) -> None:
    """Return when the address answers 200. Raises TimeoutError after READY_S."""
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own address
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer within {READY_S:g} s")


def microseconds(bursts: list[Burst], part: str) -> Spread:
    """Return CPU microseconds per request of one process."""
    return spread([getattr(each, part) / each.requests * 1e6 for each in bursts])


def compare(bench: Bench, connections: int, rounds: int, seconds: float) -> None:
    """Measure both doors in turn and print them."""
    doors = ("plain", "gated")
    seen: dict[str, list[Burst]] = {door: [] for door in doors}
    for port in (bench.ports.plain, bench.ports.public):
        bench.burst(port, connections, 0.5)
    for index in range(rounds):
        for which in abba(index):
            port = (bench.ports.plain, bench.ports.public)[which]
            seen[doors[which]].append(bench.burst(port, connections, seconds))
    print(f"\n{connections} connections, {rounds} rounds of {seconds:g} s per door, in turn")
    print(
        "door    requests/s            p50 us               p99 us               Envoy us/request    admission us/request"
    )
    for door, bursts in seen.items():
        cells = (
            spread([each.per_second for each in bursts]).show(0),
            spread([each.p50_us for each in bursts]).show(0),
            spread([each.p99_us for each in bursts]).show(0),
            microseconds(bursts, "envoy_s").show(0),
            microseconds(bursts, "admission_s").show(0),
        )
        print(f"{door:<8}{cells[0]:<22}{cells[1]:<21}{cells[2]:<21}{cells[3]:<20}{cells[4]}")
    rates = [[each.per_second for each in seen[door]] for door in ("gated", "plain")]
    added = spread([ours.p50_us - theirs.p50_us for ours, theirs in zip(seen["gated"], seen["plain"], strict=True)])
    print(f"ratio of requests/s: {ratio(*rates).show(3)}; added p50: {added.show(0)} us")


def stream(bench: Bench, count: int) -> None:
    """Print what a stream costs admission, with few and with many events."""
    seen: dict[int, list[tuple[float, float]]] = {1: [], EVENTS: []}
    for index in range(SSE_ROUNDS):
        for which in abba(index):
            events = (1, EVENTS)[which]
            seen[events].append(bench.streams(events, count))
    print(f"\n{count} streams of server-sent events, {STREAMS_AT_ONCE} at once, {SSE_ROUNDS} rounds; per stream:")
    for events, each in seen.items():
        cpu, wakes = (spread(column) for column in zip(*each, strict=True))
        print(f"{events:>3} events: admission's CPU {cpu.show(0)} us, wake-ups {wakes.show(1)}")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a burst")
    parser.add_argument("--streams", type=int, default=100)
    arguments = parser.parse_args()
    stop_children_on_signal()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = start(stack, Path(folder))
        print(f"slots {SLOTS}, Envoy with 2 threads, worker with 1, {os.cpu_count()} cores, no keys, access log on")
        print("goals: 0.14 of plain Envoy at 32 connections, less than 1,500 us added at one")
        compare(bench, 32, arguments.rounds, arguments.seconds)
        compare(bench, 1, arguments.rounds, arguments.seconds)
        stream(bench, arguments.streams)


if __name__ == "__main__":
    main()
