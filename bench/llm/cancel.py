"""What a caller who hangs up leaves behind: nothing, and how many decode steps that takes.

Counts steps, not time: `LlmService.GetStatus` is read right before a disconnect and then until the sequence is gone. Then
many callers hang up at random moments, while queued, prefilling or decoding, and the mesh must end with no permit and no
sequence, and still answer.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import socket
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bench.llm.load import FIRST_PIECE, Burst, request_bytes, run_burst
from bench.llm.mesh import Mesh, start_mesh
from bench.llm.sides import add_shape, shape_of
from bench.processes import stop_children_on_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SETTLE_LIMIT_S = 15.0
LOOK_S = 0.002  # asking without a pause would take the engine's cores
LONG_PROMPT_WORDS = 900
WORDS = ("the", "old", "city", "has", "cats", "and", "dogs", "in", "every", "street")
_T = TypeVar("_T")
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Caller:
    """One streaming chat on a socket of its own, which may be dropped at any moment."""

    def __init__(self, mesh: Mesh, prompt: str, tokens: int) -> None:
        burst = Burst(mesh.port, "/v1/chat/completions", (), 0.0)
        self._connection = socket.create_connection(("127.0.0.1", mesh.port), 10)
        self._connection.settimeout(60)
        self._connection.sendall(request_bytes(burst, mesh.body(prompt, tokens)))
        self.received = b""

    def read_text(self, pieces: int) -> bool:
        """Read until `pieces` pieces of text have come; False when the stream ended before."""
        while len(FIRST_PIECE.findall(self.received)) < pieces:
            data = self._connection.recv(65536)
            if not data:
                return False
            self.received += data
        return True

    def read_for(self, seconds: float) -> None:
        """Read whatever comes within that time, but stop at the first text."""
        end_s = time.monotonic() + seconds
        while not FIRST_PIECE.search(self.received) and (left_s := end_s - time.monotonic()) > 0:
            self._connection.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                data = self._connection.recv(65536)
                if not data:
                    return
                self.received += data

    def read_to_end(self) -> bytes:
        """Read the whole answer."""
        while data := self._connection.recv(65536):
            self.received += data
        return self.received

    def drop(self, *, reset: bool) -> None:
        """Hang up: an orderly close, or a reset."""
        if reset:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._connection.close()


def steps_until_free(mesh: Mesh, rng: random.Random) -> int:
    """Decode steps counted between a disconnect in mid-stream and the fall of `active_sequences`.

    Another stream keeps the engine stepping meanwhile. The count includes the step that was running at the disconnect.
    """
    company = Caller(mesh, "Count to one thousand in words.", 400)
    assert company.read_text(1)
    victim = Caller(mesh, f"{rng.random()}: tell a story.", 400)
    assert victim.read_text(rng.randint(1, 8))
    time.sleep(rng.random() * 0.05)
    before = mesh.engine()
    assert before.active_sequences == 2, before
    victim.drop(reset=rng.random() < 0.5)
    after = until(mesh.engine, lambda engine: engine.active_sequences < 2)
    company.drop(reset=False)
    until(mesh.engine, lambda engine: engine.active_sequences == 0)
    return int(after.steps_total - before.steps_total)


@dataclass(frozen=True, slots=True)
class Left:
    """What a mesh still holds."""

    permits: int
    slots: int
    waiting: int
    sequences: int
    requests: int

    @property
    def nothing(self) -> bool:
        """Whether it holds nothing at all."""
        return not any((self.permits, self.slots, self.waiting, self.sequences, self.requests))


def left_behind(mesh: Mesh) -> Left:
    """Read what admission and the engine still hold."""
    pools, engine = mesh.pools(), mesh.engine()
    return Left(
        permits=sum(pool.permits for pool in pools),
        slots=sum(pool.in_use for pool in pools),
        waiting=sum(pool.waiting for pool in pools),
        sequences=engine.active_sequences,
        requests=engine.waiting_requests,
    )


def until(read: Callable[[], _T], good: Callable[[_T], bool]) -> _T:
    """Read until the value is good; the last one read when it does not become so in time."""
    end_s = time.monotonic() + SETTLE_LIMIT_S
    value = read()
    while not good(value) and time.monotonic() < end_s:
        time.sleep(LOOK_S)
        value = read()
    return value


def hang_up(mesh: Mesh, rng: random.Random) -> str:
    """One caller that leaves at a random moment; tells how far it had come."""
    moment = rng.choice(("at once", "prefill", "decode"))
    words = " ".join(rng.choice(WORDS) for _ in range(LONG_PROMPT_WORDS))
    caller = Caller(mesh, words if moment == "prefill" else f"{rng.random()}: tell a story.", 200)
    if moment == "decode":
        caller.read_text(rng.randint(1, 12))
    else:
        caller.read_for(rng.random() * (0.02 if moment == "at once" else 0.5))
    caller.drop(reset=rng.random() < 0.5)
    return "decoding" if FIRST_PIECE.search(caller.received) else "before the first token"


def seeded(seed: str) -> random.Random:
    """Make a generator of random moments, the same in every run."""
    return random.Random(seed)  # noqa: S311 - moments, not secrets


def random_disconnects(mesh: Mesh, *, count: int, callers: int, seed: int) -> collections.Counter[str]:
    """Let `count` callers hang up, `callers` at a time; counts how far they had come."""
    generators = [seeded(f"{seed}/{index}") for index in range(count)]
    with ThreadPoolExecutor(callers) as threads:
        return collections.Counter(threads.map(lambda rng: hang_up(mesh, rng), generators))


def run(options: argparse.Namespace) -> bool:
    """Measure and print; True when nothing was left behind."""
    shape = shape_of(options)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniserve-bench-")))
        mesh = stack.enter_context(start_mesh(shape, environ=os.environ, folder=folder))
        print(f"{options.slots} slots, {options.threads} threads, {options.gguf.name}, seed {options.seed}", flush=True)
        rng = seeded(str(options.seed))
        steps = collections.Counter(steps_until_free(mesh, rng) for _ in range(options.trials))
        print(
            f"{options.trials} streams dropped in mid-decode; decode steps until the sequence was gone, the running one included:"
        )
        print("  " + ", ".join(f"{count} in {taken}" for taken, count in sorted(steps.items())), flush=True)
        cancelled = mesh.engine().cancelled_total, withdrawn(mesh)
        progress = random_disconnects(mesh, count=options.disconnects, callers=options.callers, seed=options.seed)
        left = until(lambda: left_behind(mesh), lambda holds: holds.nothing)
        engine_cancelled, admission_cancelled = (
            mesh.engine().cancelled_total - cancelled[0],
            withdrawn(mesh) - cancelled[1],
        )
        print(f"{options.disconnects} random disconnects by {options.callers} callers at a time: {dict(progress)}")
        print(
            f"  withdrawn while queued for a permit {admission_cancelled}, cancelled in the engine {engine_cancelled}"
        )
        print(f"  left behind: {left}")
        answer = run_burst(Burst(mesh.port, "/v1/chat/completions", (mesh.body("Are you there?", 8),), 60.0))
        complaint = answer.complaint(8)
        print(f"  a chat afterwards: {complaint or 'answered'}")
    return left.nothing and complaint is None and max(steps) <= options.most_steps


def withdrawn(mesh: Mesh) -> int:
    """Count the asks that their callers withdrew while they waited for a permit."""
    return sum(tier.cancelled_total for pool in mesh.pools() for tier in pool.tiers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 1 when anything was left behind or a slot took too many steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_shape(parser)
    parser.add_argument("--trials", type=int, default=30, help="mid-stream disconnects whose steps are counted")
    parser.add_argument("--most-steps", type=int, default=2, help="steps a slot may take: the running one, and one")
    parser.add_argument("--disconnects", type=int, default=200, help="random disconnects")
    parser.add_argument(
        "--callers", type=int, default=32, help="callers at a time; above the slots, so that some queue"
    )
    parser.add_argument("--seed", type=int, default=1, help="of all random moments")
    stop_children_on_signal()
    good = run(parser.parse_args(argv))
    print("nothing left behind" if good else "FAILED: see above")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
