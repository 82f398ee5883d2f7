"""The front door alone: real Envoy in its real wrapper, routes by the real relay, and stand-ins behind it (stand_ins.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
START_LIMIT_S = 110.0


@dataclass(frozen=True)
class Door:
    """A running front door. `wrapper` is envoy/run.sh."""

    wrapper: "subprocess.Popen[bytes]"
    environ: Mapping[str, str]
    state_dir: Path

    @property
    def public_target(self) -> str:
        return f"127.0.0.1:{self.environ['OMNISERVE_EDGE_PORT']}"

    @property
    def operator_target(self) -> str:
        return f"127.0.0.1:{self.environ['OMNISERVE_EDGE_OPERATOR_PORT']}"

    @property
    def public_url(self) -> str:
        return f"http://{self.public_target}"

    @property
    def operator_url(self) -> str:
        return f"http://{self.operator_target}"

    @property
    def facade_url(self) -> str:
        return f"http://{self.environ['OMNISERVE_FACADE_ADDRESS']}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.environ['OMNISERVE_EDGE_ADMIN_PORT']}"

    def token(self, caller: str) -> str:
        return (self.state_dir / "tokens" / caller).read_text().strip()

    def access_log(self) -> list[dict[str, object]]:
        log = self.state_dir / "logs" / "access.log"
        return [json.loads(line) for line in log.read_text().splitlines()]

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.public_url}/healthz", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass(frozen=True)
class Backstage:
    """What is behind a front door, and its configuration: all of it but Envoy."""

    environ: Mapping[str, str]
    state_dir: Path
    processes: tuple["subprocess.Popen[bytes]", ...]


@pytest.fixture(scope="session")
def open_backstage(
    free_ports: Callable[[int], list[int]],
) -> Callable[..., AbstractContextManager[Backstage]]:
    """Return `open_backstage(state_dir, **environment)`, a context manager that runs what is behind a front door."""

    @contextmanager
    def opened(state_dir: Path, **overrides: str) -> Iterator[Backstage]:
        public, operator, mesh, admin, facade, llm, admission, relay = free_ports(8)
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
            "OMNISERVE_STATE_DIR": str(state_dir),
            "OMNISERVE_EDGE_PORT": str(public),
            "OMNISERVE_EDGE_OPERATOR_PORT": str(operator),
            "OMNISERVE_EDGE_MESH_PORT": str(mesh),
            "OMNISERVE_EDGE_ADMIN_PORT": str(admin),
            "OMNISERVE_FACADE_ADDRESS": f"127.0.0.1:{facade}",
            "OMNISERVE_LLM_ADDRESS": f"127.0.0.1:{llm}",
            "OMNISERVE_ADMISSION_ADDRESS": f"127.0.0.1:{admission}",
            "OMNISERVE_RELAY_ADDRESS": f"127.0.0.1:{relay}",
            "OMNISERVE_RELAY_LISTEN": f"127.0.0.1:{relay}",
            "OMNISERVE_EDGE_ADDRESS": f"127.0.0.1:{operator}",
            **overrides,
        }
        ports = ["--facade", str(facade), "--llm", str(llm), "--admission", str(admission)]
        subprocess.run([sys.executable, "-m", "deploy.edge"], cwd=ROOT, env=environ, check=True, capture_output=True)
        behind = subprocess.Popen(
            [sys.executable, str(HERE / "stand_ins.py"), *ports, "--state-dir", str(state_dir)], cwd=ROOT, env=environ
        )
        rendering = subprocess.Popen([sys.executable, "-m", "services.relay"], cwd=ROOT, env=environ)
        try:
            yield Backstage(environ, state_dir, (behind, rendering))
        finally:
            for process in (behind, rendering):
                process.kill()
                process.wait(10)

    return opened


@pytest.fixture(scope="session")
def open_envoy(wait_until: Callable[..., None]) -> Callable[[Backstage], AbstractContextManager[Door]]:
    """Return `open_envoy(backstage)`, a context manager that runs Envoy in its wrapper before what is behind it."""

    @contextmanager
    def opened(backstage: Backstage) -> Iterator[Door]:
        wrapper = subprocess.Popen(["bash", str(ROOT / "envoy" / "run.sh")], cwd=ROOT, env=backstage.environ)
        door = Door(wrapper, backstage.environ, backstage.state_dir)
        processes = (wrapper, *backstage.processes)
        try:
            wait_until(
                lambda: _ended(*processes) or (door.is_healthy() and _answers(door.facade_url)),
                "the front door and its stand-ins",
                START_LIMIT_S,
            )
            ended = _ended(*processes)
            assert not ended, f"ended by themselves: {ended}"
            yield door
        finally:
            for _ in range(2):  # drain, and hurry
                wrapper.terminate()
            wrapper.wait(30)

    return opened


@pytest.fixture(scope="session")
def open_door(
    open_backstage: Callable[..., AbstractContextManager[Backstage]],
    open_envoy: Callable[[Backstage], AbstractContextManager[Door]],
) -> Callable[..., AbstractContextManager[Door]]:
    """Return `open_door(state_dir, **environment)`, a context manager that runs a front door with stand-ins behind it."""

    @contextmanager
    def opened(state_dir: Path, **overrides: str) -> Iterator[Door]:
        with open_backstage(state_dir, **overrides) as backstage, open_envoy(backstage) as door:
            yield door

    return opened


def _ended(*processes: "subprocess.Popen[bytes]") -> list[object]:
    return [process.args for process in processes if process.poll() is not None]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def door(
    open_door: Callable[..., AbstractContextManager[Door]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    """A front door shared by the tests of the run."""
    with open_door(tmp_path_factory.mktemp("door")) as opened:
        yield opened
