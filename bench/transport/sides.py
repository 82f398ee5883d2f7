"""Everything that is measured against each other, started together: same worker, same request, same load generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.processes import CHECKOUT, Child, cpu_seconds, family, free_ports
from bench.transport import peer
from bench.transport.envoys import answering, relaying
from bench.transport.exchange import CHAT_PATH, answer, question
from bench.transport.front_door import Behind, FrontDoor, front_door
from bench.transport.report import Burst, Name, read_burst

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack

READY_S = 120.0
PEER_READY_S = 400.0  # LiteLLM imports for half a minute on a quiet machine
BURST_MARGIN_S = 60.0
ENVOY_THREADS = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One thing to ask. `proxy`, `admission`: the processes that do the work, each with its children."""

    name: Name
    port: int
    key: str = ""
    proxy: tuple[int, ...] = ()
    admission: tuple[int, ...] = ()

    def burst(self, load: Path, connections: int, seconds: float) -> Burst:
        """Ask on so many connections for so many seconds. Raises RuntimeError when an answer was not 200."""
        before = _spent(self.proxy), _spent(self.admission)
        command = [str(load), str(self.port), str(connections), str(seconds)]
        limit_s = seconds + BURST_MARGIN_S
        done = subprocess.run(command, input=question(self.key), capture_output=True, timeout=limit_s, check=False)
        if done.returncode:
            raise RuntimeError(f"asking {self.name.value} failed: {done.stderr.decode(errors='replace')}")
        after = _spent(self.proxy), _spent(self.admission)
        return read_burst(done.stdout.decode(), proxy_s=after[0] - before[0], admission_s=after[1] - before[1])


@dataclass(frozen=True, slots=True)
class Sides:
    """What runs. `gated`: the front door without keys, whose second worker streams."""

    all: tuple[Side, ...]
    gated: FrontDoor


def _spent(roots: tuple[int, ...]) -> float:
    return sum(cpu_seconds(pid) for root in roots for pid in family(root))


def build_load(folder: Path) -> Path:
    """Compile the load generator."""
    program = folder / "load"
    source = Path(__file__).with_name("load.c")
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(program), str(source)], check=True, timeout=60)
    return program


class Starter:
    """Starts what is measured; everything ends with the stack."""

    def __init__(self, stack: ExitStack, folder: Path, collector: str) -> None:
        self._stack = stack
        self._folder = folder
        self._collector = collector
        self._children: list[Child] = []

    def all(self, peers: Path | None) -> Sides:
        """Start everything and wait until it answers. `peers`: their environment; None leaves them out."""
        worker, plain, events = free_ports(3)
        self._envoy("worker", answering(worker, answer()), 1)
        script = CHECKOUT / "tests" / "fixtures" / "worker_process.py"
        journal = str(self._folder / "events.jsonl")
        self._run("events", os.environ, sys.executable, str(script), "--journal", journal, f"events={events}")
        envoy = self._envoy("plain", relaying(plain, worker), ENVOY_THREADS)
        behind = Behind(worker, events, self._collector)
        gated, keyed = self._door("gated", behind), self._door("keyed", behind)
        sides = [
            Side(Name.DIRECT, worker),
            Side(Name.PLAIN, plain, proxy=(envoy,)),
            _door_side(Name.GATED, gated),
            _door_side(Name.KEYED, keyed),
            *self._peers(peers, worker),
        ]
        for side in sides:
            wait_for(side, self._check)
        return Sides(tuple(sides), gated)

    def _peers(self, root: Path | None, worker: int) -> list[Side]:
        if root is None:
            return []
        litellm, relay = free_ports(2)
        cores = os.cpu_count() or 1
        config = self._folder / "litellm.yaml"
        config.write_text(peer.litellm_config(worker))
        environ = peer.litellm_environ(os.environ, root)
        proxy = self._run("litellm", environ, *peer.litellm_command(root, config, litellm, cores))
        command = [str(root / "bin" / "python"), str(Path(__file__).with_name("relay.py"))]
        where = [str(relay), f"http://127.0.0.1:{worker}"]
        relays = [self._run(f"relay{number}", environ, *command, *where) for number in range(cores)]
        return [Side(Name.LITELLM, litellm, proxy=(proxy,)), Side(Name.RELAY, relay, proxy=tuple(relays))]

    def _door(self, name: str, behind: Behind) -> FrontDoor:
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with_keys = name == "keyed"
        return self._stack.enter_context(front_door(name, self._folder, behind, environ, with_keys=with_keys))

    def _envoy(self, name: str, config: dict[str, Any], threads: int) -> int:
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(config))
        binary = str(Path(sys.executable).with_name("envoy"))
        options = ("--concurrency", str(threads), "-l", "error", "--disable-hot-restart")
        return self._run(name, os.environ, binary, "-c", str(path), *options)

    def _run(self, name: str, environ: Mapping[str, str], *command: str) -> int:
        child = Child(command, environ=environ, log=self._folder / f"{name}.log", cwd=CHECKOUT)
        self._children.append(self._stack.enter_context(child))
        return child.pid

    def _check(self) -> None:
        for child in self._children:
            child.check()


def _door_side(name: Name, door: FrontDoor) -> Side:
    return Side(name, door.port, door.key, proxy=(door.envoy,), admission=(door.admission,))


def wait_for(side: Side, check: Callable[[], None]) -> None:
    """Return when the side answers the request. Raises TimeoutError; `check` raises when waiting is useless."""
    head, _, body = question(side.key).partition(b"\r\n\r\n")
    headers = dict(line.decode().split(": ", 1) for line in head.split(b"\r\n")[1:])
    request = urllib.request.Request(f"http://127.0.0.1:{side.port}{CHAT_PATH}", body, headers)
    limit_s = PEER_READY_S if side.name is Name.LITELLM else READY_S
    ends = time.monotonic() + limit_s
    last = ""
    while time.monotonic() < ends:
        check()
        try:
            with urllib.request.urlopen(request, timeout=10) as said:  # noqa: S310 - our own address
                if json.loads(said.read())["choices"]:
                    return
        except (urllib.error.URLError, OSError) as error:
            last = str(error)
            time.sleep(0.1)
    raise TimeoutError(f"{side.name.value} did not answer within {limit_s:g} s: {last}")
