"""The whole mesh as a fixture: real processes under the real launcher, on free ports, with a state directory of its own."""

import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import hypothesis
import psutil
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as transports

from deploy.control import NotRunningError, Process, Supervisor
from tests.fixtures.parallel import arrange, calm_openmp, own_ports, restore_signals, scope, turn

# Continuous integration judges a commit, so the same commit gets the same examples; everybody else explores. No test is a
# matter of time, whatever else the machine does.
hypothesis.settings.register_profile("here", derandomize=bool(os.environ.get("CI")), deadline=None)
hypothesis.settings.load_profile("here")

restore_signals()
calm_openmp()

# A client of httpx or of an official SDK reads the authorities of the whole web, which takes longer than most requests here,
# and every such client reads the same ones.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)
# Where a test says nothing of time: on a crowded machine, more than httpx's own 5 s can pass before an answer.
for step in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, step, 60.0)

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 240.0
# To be told of all its parts costs a mesh more than most requests, and what starts meanwhile needs the machine.
LOOK_S = 0.2
# How far above its own port admission listens for Envoy's calls, unless told otherwise.
BESIDE = 11
LOWEST_PORT, HIGHEST_PORT = own_ports(20_000, 31_000)
_given: deque[int] = deque(maxlen=200)
_chance = random.Random()  # tests that make their scenario from a seed must not get the same ports again


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under pytest-xdist, begin with what takes long."""
    if hasattr(config, "workerinput"):
        arrange(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Under pytest-xdist, keep together what shares something."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # noqa: PLC0415 - only there when it runs

    class Scheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Under pytest-xdist, keep others from running beside a test that is marked so; waiting counts for no time limit."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, below the range that the kernel takes for outgoing connections.

    The ports 11 above are free too, since admission answers Envoy there, and none was given out a moment ago.
    """
    found: list[int] = []
    while len(found) < count:
        port = _chance.randint(LOWEST_PORT, HIGHEST_PORT - BESIDE)
        if not {port, port + BESIDE} & {*_given, *(each + BESIDE for each in _given)} and all(
            _is_free(each) for each in (port, port + BESIDE)
        ):
            found.append(port)
            _given.append(port)
    return found


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 120.0, every_s: float = 0.05) -> None:
    """Return as soon as the condition holds; fail with `what` when it never does. `every_s`: between looks, which may cost."""
    ends = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > ends:
            pytest.fail(f"{what}: not within {limit_s:g} s")
        time.sleep(every_s)


@dataclass(frozen=True)
class Mesh:
    """A running mesh. Services by name: admission, vram, relay, llm, facade, envoy."""

    launcher: "subprocess.Popen[str]"
    environ: Mapping[str, str]
    state_dir: Path
    output: Path

    @property
    def public_url(self) -> str:
        """Base address of the public listener."""
        return f"http://{self.public_target}"

    @property
    def public_target(self) -> str:
        """The public listener as host:port, for gRPC channels."""
        return f"127.0.0.1:{self.environ['OMNISERVE_EDGE_PORT']}"

    @property
    def operator_url(self) -> str:
        """Base address of the operator listener."""
        return f"http://{self.operator_target}"

    @property
    def operator_target(self) -> str:
        """The operator listener as host:port."""
        return f"127.0.0.1:{self.environ['OMNISERVE_EDGE_OPERATOR_PORT']}"

    @property
    def mesh_url(self) -> str:
        """Base address of the listener for services of the mesh."""
        return f"http://127.0.0.1:{self.environ['OMNISERVE_EDGE_MESH_PORT']}"

    @property
    def admin_url(self) -> str:
        """Base address of Envoy's admin interface."""
        return f"http://127.0.0.1:{self.environ['OMNISERVE_EDGE_ADMIN_PORT']}"

    def address(self, service: str) -> str:
        """Return where a service listens, host:port."""
        return self.environ[f"OMNISERVE_{service.upper()}_LISTEN"]

    def token(self, caller: str) -> str:
        """Return a service token: admission, vram, relay, llm, facade, envoy, envoy-public, envoy-operator or cli."""
        return (self.state_dir / "tokens" / caller).read_text().strip()

    def log(self, service: str) -> str:
        """Return a service's log so far."""
        return (self.state_dir / "logs" / f"{service}.log").read_text(errors="replace")

    def processes(self) -> dict[str, Process]:
        """Return the supervised processes by service."""
        return Supervisor(self.state_dir / "supervisor" / "supervisor.sock").processes()

    def pid(self, service: str) -> int:
        """Return a service's process id; for envoy that of Envoy itself, not of its wrapper. 0 while none runs."""
        pid = self.processes()[service].pid
        if service == "envoy" and pid:
            with suppress(psutil.NoSuchProcess):
                found = [p for p in psutil.Process(pid).children() if p.name() == "envoy"]
                return max(found, key=lambda p: p.create_time()).pid if found else 0  # one may be on its way out
        return pid

    def children(self, service: str) -> list[int]:
        """Return the process ids below a service: an engine's hosts."""
        return [child.pid for child in psutil.Process(self.pid(service)).children(recursive=True)]

    def kill(self, service: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a service; return the process id it had."""
        pid = self.pid(service)
        os.kill(pid, number)
        return pid

    def restart(self, service: str) -> None:
        """Drain and start one service, and wait until the mesh is ready again."""
        Supervisor(self.state_dir / "supervisor" / "supervisor.sock").restart(service)
        self.wait_ready()

    def is_ready(self) -> bool:
        """Return whether the whole chain says so through the front door."""
        try:
            return httpx.get(f"{self.public_url}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> None:
        """Wait until the front door answers that everything is ready."""
        wait_until(self.is_ready, "the mesh is ready", every_s=LOOK_S)

    def wait_replaced(self, service: str, old_pid: int) -> int:
        """Wait until another process of the service runs than `old_pid` and the mesh is ready; return its id."""
        wait_until(lambda: self.pid(service) not in {0, old_pid}, f"{service} runs again", every_s=LOOK_S)
        self.wait_ready()
        return self.pid(service)


def mesh_environ(state_dir: Path, **overrides: str) -> dict[str, str]:
    """Return an environment for a mesh of its own: free ports, a state directory, none of the caller's settings."""
    edge = ("EDGE_PORT", "EDGE_OPERATOR_PORT", "EDGE_MESH_PORT", "EDGE_ADMIN_PORT")
    services = (
        "ADMISSION_LISTEN",
        "ADMISSION_CHECKS_LISTEN",
        "VRAM_LISTEN",
        "RELAY_LISTEN",
        "LLM_LISTEN",
        "DIFFUSION_LISTEN",
        "JOBS_LISTEN",
        "FACADE_LISTEN",
    )
    names = (*edge, *services)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))}
    return {
        **inherited,
        "OMNISERVE_STATE_DIR": str(state_dir),
        **{f"OMNISERVE_{n}": f"127.0.0.1:{p}" if n.endswith("LISTEN") else str(p) for n, p in ports.items()},
        **overrides,
    }


@contextmanager
def running_mesh(state_dir: Path, **overrides: str) -> Iterator[Mesh]:
    """Run a mesh for the length of a block. `overrides`: environment variables."""
    state_dir.mkdir(parents=True, exist_ok=True)
    environ = mesh_environ(state_dir, **overrides)
    output = state_dir / "launcher.log"
    with output.open("w") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "deploy.run"], cwd=ROOT, env=environ, stdout=file, stderr=file, text=True
        )
    mesh = Mesh(launcher, environ, state_dir, output)
    try:
        wait_until(
            lambda: "The mesh is ready" in output.read_text() or launcher.poll() is not None, "ready", START_LIMIT_S
        )
        assert launcher.poll() is None, f"the launcher ended with {launcher.returncode}:\n{output.read_text()}"
        yield mesh
    finally:
        _stop(mesh)


def _stop(mesh: Mesh) -> None:
    with suppress(NotRunningError):
        pids: list[int] = []
        with suppress(xmlrpc.client.Fault):  # one that is shutting down already tells nothing
            pids = [process.pid for process in mesh.processes().values() if process.pid]
        mesh.launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            mesh.launcher.wait(1)
            return
        mesh.launcher.terminate()  # hurry: nobody is left to be waited for
        with suppress(subprocess.TimeoutExpired):
            mesh.launcher.wait(20)
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    mesh.launcher.kill()
    mesh.launcher.wait()


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The whole mesh, shared by every test of the run: leave it ready, as you found it."""
    with running_mesh(tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest.fixture(scope="session")
def make_mesh() -> Callable[..., "contextmanager[Mesh]"]:
    """Return `running_mesh(state_dir, **environment)` for tests that need a mesh of their own."""
    return running_mesh


@pytest.fixture(scope="session", name="mesh_environ")
def _mesh_environ() -> Callable[..., dict[str, str]]:
    """Return `mesh_environ(state_dir, **environment)` for tests that start processes themselves."""
    return mesh_environ


@pytest.fixture(scope="session", name="free_ports")
def _free_ports() -> Callable[[int], list[int]]:
    """Return `free_ports(count)`."""
    return free_ports


@pytest.fixture(scope="session", name="wait_until")
def _wait_until() -> Callable[..., None]:
    """Return `wait_until(condition, what, limit_s, every_s)`."""
    return wait_until
