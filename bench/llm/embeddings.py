"""Vectors per second of the whole mesh against `llama-server --embedding` built from the same llama.cpp, in interleaved rounds."""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.llm import peer
from bench.llm.mesh import start_mesh
from bench.llm.sides import Peer, Shape, Side, start_peer
from bench.measure import Spread, abba, ratio, spread
from bench.models import default_gguf
from bench.processes import CHECKOUT, cpu_seconds, stop_children_on_signal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_MODEL = CHECKOUT / "models" / "all-MiniLM-L6-v2.Q8_0.gguf"
RESULTS = CHECKOUT / "build" / "bench" / "embeddings.json"
# Requests of one burst by inputs of each: about as much work in every kind of burst.
REQUESTS = {1: 64, 16: 12, 256: 4}
WORDS = (
    "river",
    "market",
    "engine",
    "winter",
    "letter",
    "garden",
    "signal",
    "doctor",
    "bridge",
    "coffee",
    "window",
    "metal",
)
AGREEMENT = 0.999


@dataclass(frozen=True, slots=True)
class Sample:
    """One burst at one side."""

    side: str
    inputs: int
    callers: int
    round_index: int
    seconds: float
    requests: int
    cpu_s: float

    @property
    def texts_per_s(self) -> float:
        """Vectors by the time from the burst's start to its last answer."""
        return self.requests * self.inputs / self.seconds


def texts(first: int, count: int, words: int) -> list[str]:
    """Different texts of equal length."""
    return [
        " ".join(WORDS[(number * 7 + place * (1 + number % 5)) % len(WORDS)] for place in range(words))
        for number in range(first, first + count)
    ]


def ask(connection: http.client.HTTPConnection, inputs: Sequence[str]) -> bytes:
    """Answer to one request, unparsed; base64 is what OpenAI's SDKs ask for by themselves."""
    body = json.dumps({"input": list(inputs), "encoding_format": "base64"})
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    data = answer.read()
    assert answer.status == 200, data[:300]
    return data


def vectors(data: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Rows of an answer."""
    rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in json.loads(data)["data"]]
    return np.array(rows)


def burst(side: Side, inputs: int, callers: int, words: int, round_index: int) -> Sample:
    """Send the requests of one burst over connections opened beforehand."""
    count = REQUESTS[inputs]
    requests = [texts(number * inputs, inputs, words) for number in range(count)]
    connections = [http.client.HTTPConnection("127.0.0.1", side.port, timeout=300) for _ in range(min(callers, count))]
    for connection in connections:
        connection.connect()

    def call(place: int) -> None:
        for request in requests[place :: len(connections)]:
            ask(connections[place], request)

    pids = [pid for part in side.processes().values() for pid in part]
    cpu_s = sum(map(cpu_seconds, pids))
    with ThreadPoolExecutor(len(connections)) as pool:
        began_s = time.perf_counter()
        list(pool.map(call, range(len(connections))))
        seconds = time.perf_counter() - began_s
    cpu_s = sum(map(cpu_seconds, pids)) - cpu_s
    for connection in connections:
        connection.close()
    return Sample(side.name, inputs, callers, round_index, seconds, count, cpu_s)


def check_agreement(sides: Sequence[Side], words: int) -> float:
    """Least cosine between both sides' vectors of the same texts; AssertionError when they are of different models."""
    rows = []
    for side in sides:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", side.port, timeout=300)) as connection:
            rows.append(vectors(ask(connection, texts(0, 32, words))))
    least = float((rows[0] * rows[1]).sum(axis=1).min())
    assert least > AGREEMENT, f"the sides disagree: cosine {least}"
    return least


def run(sides: tuple[Side, Side], options: argparse.Namespace) -> Iterator[Sample]:
    """Bursts in interleaved rounds; a first one of each kind warms up and does not count."""
    for inputs in options.inputs:
        for side in sides:
            burst(side, inputs, options.callers, options.words, -1)
        for round_index in range(options.rounds):
            for place in abba(round_index):
                yield burst(sides[place], inputs, options.callers, options.words, round_index)


def table(samples: Sequence[Sample], names: tuple[str, str], options: argparse.Namespace) -> str:
    """Show what came out, a line for each number of inputs."""
    lines = [
        f"{'inputs':>7} {'texts/s: ' + names[0]:>22} {names[1]:>14} {'requests/s':>21} {'ratio':>18} {'CPU ms/text':>16}"
    ]
    for inputs in options.inputs:
        ours, theirs = (
            sorted((s for s in samples if s.inputs == inputs and s.side == name), key=lambda s: s.round_index)
            for name in names
        )
        speeds = [spread([s.texts_per_s for s in side]).median for side in (ours, theirs)]
        by_request = [speed / inputs for speed in speeds]
        cpu = [spread([1000 * s.cpu_s / (s.requests * s.inputs) for s in side]).median for side in (ours, theirs)]
        lines.append(
            f"{inputs:>7} {speeds[0]:>22.1f} {speeds[1]:>14.1f} {by_request[0]:>10.2f} {by_request[1]:>10.2f} "
            f"{ratio_of(ours, theirs).show(2):>18} {cpu[0]:>8.2f}{cpu[1]:>8.2f}"
        )
    return "\n".join(lines)


def ratio_of(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread:
    """Texts per second, ours over theirs, round by round."""
    return ratio([s.texts_per_s for s in ours], [s.texts_per_s for s in theirs])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=DEFAULT_MODEL, help="embedding model that both sides serve")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads of both sides")
    parser.add_argument("--slots", type=int, default=16, help="requests (ours) and inputs (theirs) at once")
    parser.add_argument("--callers", type=int, default=4, help="requests at once")
    parser.add_argument("--inputs", type=int, nargs="+", choices=sorted(REQUESTS), default=[1, 16, 256])
    parser.add_argument("--words", type=int, default=16, help="words of every text")
    parser.add_argument("--rounds", type=int, default=6, help="interleaved rounds per number of inputs")
    parser.add_argument("--peer", type=Path, help="a llama-server to use instead of building one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 0."""
    options = arguments(argv)
    stop_children_on_signal()
    server = options.peer or peer.build(peer.installed_version(), jobs=os.cpu_count() or 1)
    shape = Shape(options.gguf, options.threads, options.slots, 512 * options.slots)
    own = {
        **os.environ,
        "OMNISERVE_EMBEDDING_GGUF": str(options.gguf),
        "OMNISERVE_EMBEDDING_THREADS": str(options.threads),
        "OMNISERVE_ADMISSION_CPU_SLOTS": str(options.slots),
    }
    text = Shape(default_gguf(), 1, 4, 2048)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        child, port = start_peer(
            server,
            shape,
            environ=os.environ,
            log=Path(folder) / "peer.log",
            extra=["--embedding", "--ubatch-size", "512"],
        )
        running.callback(child.stop)
        sides = (running.enter_context(start_mesh(text, environ=own, folder=Path(folder))), Peer(child, port))
        settings = {name: str(value) for name, value in vars(options).items()}
        print(json.dumps(settings))
        print(f"least cosine between the two sides' vectors: {check_agreement(sides, options.words):.5f}")
        samples = list(run(sides, options))
    print(table(samples, (sides[0].name, sides[1].name), options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"settings": settings, "samples": [asdict(each) for each in samples]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
