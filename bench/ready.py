"""Seconds from `make run` to a ready front door, in a checkout whose virtual environment is built."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.llm.load import Burst, run_burst
from bench.llm.mesh import door_settings
from bench.llm.sides import chat_body, wait_ready
from bench.measure import spread
from bench.processes import CHECKOUT, Child, stop_children_on_signal

if TYPE_CHECKING:
    from collections.abc import Sequence

FLOOR_S = 20.0
READY_LIMIT_S = 120.0


def one_start(command: Sequence[str]) -> tuple[float, float]:
    """Seconds from the command to /readyz saying 200, and then to a whole answer; everything is stopped again."""
    with tempfile.TemporaryDirectory(prefix="omniserve-bench-") as folder:
        doors = door_settings(Path(folder) / "state")
        environ, port = dict(os.environ) | doors, int(doors["OMNISERVE_EDGE_PORT"])
        start_s = time.monotonic()
        with Child(command, environ=environ, log=Path(folder) / "run.log", cwd=CHECKOUT) as child:
            wait_ready(f"http://127.0.0.1:{port}/readyz", child.check, READY_LIMIT_S)
            ready_s = time.monotonic() - start_s
            body = chat_body("What is the capital of France?", 8)
            complaint = run_burst(Burst(port, "/v1/chat/completions", (body,), 60.0)).complaint(8)
            answered_s = time.monotonic() - start_s
        if complaint:
            raise RuntimeError(f"ready, but the first chat failed: {complaint}")
    return ready_s, answered_s


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when the median is above the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="starts")
    parser.add_argument("--command", nargs="+", default=["make", "run"], help="what starts the mesh in the foreground")
    options = parser.parse_args(argv)
    stop_children_on_signal()
    subprocess.run(["make", "setup"], cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
    starts = []
    for _ in range(options.rounds):
        starts.append(one_start(options.command))
        print(f"ready after {starts[-1][0]:.1f} s, first chat answered after {starts[-1][1]:.1f} s", flush=True)
    ready = spread([ready_s for ready_s, _ in starts])
    print(
        f"`{' '.join(options.command)}` to ready: {ready.show(1)} s, {ready.median / FLOOR_S:.2f} of the {FLOOR_S:.0f} s allowed"
    )
    return 0 if ready.median <= FLOOR_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
