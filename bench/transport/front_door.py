"""The front door under measurement, as `make run` starts it: Envoy in its wrapper, relay, admission. No engine is needed.

`/v1/chat/completions` goes to the worker as to any upstream, under a permit; `/v1/audio/speech` to the one that streams.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.processes import CHECKOUT, Child, free_ports
from services.kit import keyring
from services.kit.keyring import Key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SLOTS = 4096
"""More than ever run at once: what is measured is the gate, not a queue."""
TRACED_PERCENT = 1.0
CONFIGURE_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of one front door; nobody serves `absent`."""

    public: int
    operator: int
    mesh: int
    admin: int
    admission: int
    checks: int
    relay: int
    absent: int


@dataclass(frozen=True, slots=True)
class Behind:
    """What stands behind it: ports of the two workers, and the collector's endpoint."""

    worker: int
    events: int
    collector: str


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """A running front door. `key`: what callers show, "" when nobody needs a key. `envoy`: the wrapper's process."""

    port: int
    key: str
    envoy: int
    admission: int


def settings(ports: Ports, behind: Behind, state_dir: Path) -> dict[str, str]:
    """Return its environment."""
    return {
        "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'protos' / 'gen'}",
        "OMNISERVE_STATE_DIR": str(state_dir),
        "OMNISERVE_SLOTS": str(SLOTS),
        "OMNISERVE_EDGE_PORT": str(ports.public),
        "OMNISERVE_EDGE_OPERATOR_PORT": str(ports.operator),
        "OMNISERVE_EDGE_MESH_PORT": str(ports.mesh),
        "OMNISERVE_EDGE_ADMIN_PORT": str(ports.admin),
        "OMNISERVE_EDGE_TRACED_PERCENT": f"{TRACED_PERCENT:g}",
        "OMNISERVE_EDGE_ADDRESS": f"127.0.0.1:{ports.operator}",
        "OMNISERVE_ADMISSION_LISTEN": f"127.0.0.1:{ports.admission}",
        "OMNISERVE_ADMISSION_ADDRESS": f"127.0.0.1:{ports.admission}",
        "OMNISERVE_ADMISSION_CHECKS_LISTEN": f"127.0.0.1:{ports.checks}",
        "OMNISERVE_EDGE_ADMISSION_CHECKS_ADDRESS": f"127.0.0.1:{ports.checks}",
        "OMNISERVE_RELAY_LISTEN": f"127.0.0.1:{ports.relay}",
        "OMNISERVE_RELAY_ADDRESS": f"127.0.0.1:{ports.relay}",
        "OMNISERVE_FACADE_ADDRESS": f"127.0.0.1:{ports.absent}",
        "OMNISERVE_LLM_ADDRESS": f"127.0.0.1:{ports.absent}",
        "OMNISERVE_LLM_UPSTREAM": f"http://127.0.0.1:{behind.worker}",
        "OMNISERVE_TTS_UPSTREAM": f"http://127.0.0.1:{behind.events}",
        "OTEL_EXPORTER_OTLP_ENDPOINT": behind.collector,
    }


def make_key(state_dir: Path) -> str:
    """Make a key in a state directory and return its text."""
    text, now = keyring.new_text(), time.time()
    keyring.add(keyring.keyring_path(state_dir), Key("bench", keyring.digest(text), "paid", created=now), now=now)
    return text


@contextmanager
def front_door(
    name: str, folder: Path, behind: Behind, environ: Mapping[str, str], *, with_keys: bool
) -> Iterator[FrontDoor]:
    """Run one for the length of a block; it is not waited for."""
    ports = Ports(*free_ports(len(Ports.__dataclass_fields__)))
    state_dir = folder / name
    key = make_key(state_dir) if with_keys else ""
    inherited = {name: value for name, value in environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))}
    variables = inherited | settings(ports, behind, state_dir)
    command = [sys.executable, "-m", "deploy.edge"]
    subprocess.run(
        command, cwd=CHECKOUT, env=variables, check=True, stdout=subprocess.DEVNULL, timeout=CONFIGURE_LIMIT_S
    )
    with ExitStack() as stack:

        def run(part: str, *words: str) -> int:
            child = Child(words, environ=variables, log=folder / f"{name}-{part}.log", cwd=CHECKOUT)
            return stack.enter_context(child).pid

        admission = run("admission", sys.executable, "-m", "services.admission")
        run("relay", sys.executable, "-m", "services.relay")
        envoy = run("envoy", "bash", str(CHECKOUT / "envoy" / "run.sh"))
        yield FrontDoor(ports.public, key, envoy, admission)
