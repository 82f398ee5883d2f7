"""What a stream of server-sent events costs admission: CPU time, and how often its event loop wakes up.

The same number of streams with one event each and with fifty. Chunks do not pass admission, so they must not wake it.
"""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import abba, spread
from bench.transport.exchange import SPEECH_PATH

if TYPE_CHECKING:
    from bench.transport.front_door import FrontDoor

EVENTS = 50
AT_ONCE = 10
ROUNDS = 4
STREAM_LIMIT_S = 60.0


def measure(door: FrontDoor, count: int) -> list[str]:
    """Return what `count` streams cost, few and many events each."""
    seen: dict[int, list[tuple[float, float]]] = {1: [], EVENTS: []}
    _read(door.port, 1)  # opens Envoy's connections
    for index in range(ROUNDS):
        for which in abba(index):
            events = (1, EVENTS)[which]
            seen[events].append(_cost(door, events, count))
    lines = [f"{count} streams of server-sent events, {AT_ONCE} at once, {ROUNDS} rounds; per stream:"]
    for events, each in seen.items():
        cpu, wakes = (spread(column) for column in zip(*each, strict=True))
        lines.append(f"{events:>3} events: admission's CPU {cpu.show(0)} us, wake-ups {wakes.show(1)}")
    return lines


def _cost(door: FrontDoor, events: int, count: int) -> tuple[float, float]:
    """Read so many streams; return admission's CPU microseconds and its event loop's wake-ups, per stream."""
    before = _scheduled_seconds(door.admission), _wakeups(door.admission)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(_read, [door.port] * count, [events] * count))
    after = _scheduled_seconds(door.admission), _wakeups(door.admission)
    return (after[0] - before[0]) / count * 1e6, (after[1] - before[1]) / count


def _read(port: int, events: int) -> None:
    headers = {"x-do": f"sse?chunks={events}&delay_ms=1", "content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{SPEECH_PATH}", b"{}", headers)
    with urllib.request.urlopen(request, timeout=STREAM_LIMIT_S) as answer:  # noqa: S310 - our own address
        if not answer.read().endswith(b"data: [DONE]\n\n"):
            raise RuntimeError("a stream was cut")


def _scheduled_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far, to the nanosecond."""
    stats = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(fields[0]) for fields in stats) / 1e9


def _wakeups(pid: int) -> int:
    """Return how often a process's main thread has gone to sleep so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
