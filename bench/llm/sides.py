"""What a bench compares: anything that answers OpenAI-style streams on a loopback port and whose processes can be watched."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.models import default_gguf
from bench.processes import CHECKOUT, Child, family, free_ports

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

READY_LIMIT_S = 120.0
PEER_NAME = "llama-server"


@dataclass(frozen=True, slots=True)
class Shape:
    """What both sides are set to alike: the model's file, compute threads, sequences at once, context tokens in all."""

    gguf: Path
    threads: int
    slots: int
    context_tokens: int


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a Shape."""
    parser.add_argument("--gguf", type=Path, default=default_gguf(), help="model to serve")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads")
    parser.add_argument("--slots", type=int, default=16, help="sequences at once")
    parser.add_argument("--context", type=int, default=8192, help="context tokens in all")


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the Shape that the arguments give."""
    return Shape(options.gguf, options.threads, options.slots, options.context)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since a server's start: decode calls, and milliseconds inside llama.cpp where the server tells."""

    steps: int
    decode_ms: float | None

    def since(self, before: Counters) -> Counters:
        """Count what was added after `before`."""
        steps = self.steps - before.steps
        if self.decode_ms is None or before.decode_ms is None:
            return Counters(steps, None)
        return Counters(steps, self.decode_ms - before.decode_ms)


class Side(Protocol):
    """One server under measurement."""

    @property
    def name(self) -> str:
        """Column title."""

    @property
    def port(self) -> int:
        """Loopback port of its HTTP door."""

    def body(self, prompt: str, tokens: int) -> str:
        """JSON of a chat that streams exactly `tokens` tokens, greedily and without any warm prefix."""

    def processes(self) -> Mapping[str, Sequence[int]]:
        """Process ids by part."""

    def counters(self) -> Counters:
        """Read the counts so far."""


def chat_body(prompt: str, tokens: int, **extra: object) -> str:
    """JSON of a greedy streamed chat that goes on after the model's end token; `extra` are one side's own fields."""
    request: dict[str, object] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request | extra)


class Peer:
    """`llama-server` of the same llama.cpp."""

    def __init__(self, child: Child, port: int, name: str = PEER_NAME) -> None:
        self.name = name
        self.port = port
        self._child = child

    def body(self, prompt: str, tokens: int) -> str:
        """As Side says; the shortest sampler chain it has, since its default one does work that greedy choice ignores."""
        return chat_body(prompt, tokens, samplers=["temperature"])

    def processes(self) -> Mapping[str, Sequence[int]]:
        """As Side says."""
        return {self.name: family(self._child.pid)}

    def counters(self) -> Counters:
        """As Side says; llama-server tells its decode calls only."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        (steps,) = (line.split()[1] for line in lines if line.startswith("llamacpp:n_decode_total "))
        return Counters(steps=int(float(steps)), decode_ms=None)


def peer_command(server: Path, shape: Shape, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Command line of a llama-server of this shape.

    The cache of prompts in host memory is off since the bench asks for no warm prefixes; everything else that is not named
    is llama-server's default.
    """
    threads = ["--threads", str(shape.threads), "--threads-batch", str(shape.threads)]
    sizes = ["--parallel", str(shape.slots), "--ctx-size", str(shape.context_tokens), "--cache-ram", "0"]
    door = ["--host", "127.0.0.1", "--port", str(port), "--metrics", "--no-ui"]
    return [str(server), "--model", str(shape.gguf), *threads, *sizes, *door, *extra]


def start_peer(
    server: Path, shape: Shape, *, environ: Mapping[str, str], log: Path, extra: Sequence[str] = ()
) -> tuple[Child, int]:
    """Start a llama-server and wait until it is ready; gives it with its port, and the caller stops it."""
    (port,) = free_ports(1)
    child = Child(peer_command(server, shape, port, extra), environ=environ, log=log, cwd=CHECKOUT)
    try:
        wait_ready(f"http://127.0.0.1:{port}/health", child.check)
    except BaseException:
        child.stop()
        raise
    return child, port


def wait_ready(address: str, check: Callable[[], None], limit_s: float = READY_LIMIT_S) -> float:
    """Seconds until `address` answered 200; `check` raises when waiting is useless."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < limit_s:
        check()
        try:
            with urllib.request.urlopen(address, timeout=5):  # noqa: S310 - a loopback address of this bench
                return time.monotonic() - start_s
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise TimeoutError(f"{address} was not ready within {limit_s:.0f} s")
