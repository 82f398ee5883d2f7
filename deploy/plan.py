"""What a start needs to know, gathered from the environment before anything is touched."""

import getpass
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.edge_settings import EdgeSettings
from deploy.ports import Listen
from deploy.programs import Paths, Program, programs
from deploy.readiness import Probe, grpc_probe, http_probe
from deploy.run_settings import RunSettings
from services.kit.settings import MeshSettings, ServiceSettings, check_environment, load
from services.kit.settings_docs import discover
from services.kit.wire.callouts import beside

ROOT: Final = Path(__file__).resolve().parents[1]
# Who shows a token of its own; made before the start, so that nobody races for them.
TOKENS: Final = (
    "admission",
    "vram",
    "relay",
    "llm",
    "diffusion",
    "jobs",
    "facade",
    "envoy",
    "envoy-public",
    "envoy-operator",
    "cli",
)
_SERVED: Final = ("admission", "vram", "relay", "llm", "diffusion", "jobs", "facade")
_LONGEST_SOCKET: Final = 100
_MOST_FILES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Service:
    """One process of the mesh as the launcher waits for it. `where`: host:port.

    `asks`: it is ready when those before it are, whom it asks itself: to ask it earlier would only keep them from starting.
    """

    name: str
    where: str
    probe: Probe
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a start needs."""

    environ: Mapping[str, str]
    edge: EdgeSettings
    run: RunSettings
    paths: Paths
    programs: tuple[Program, ...]
    listens: tuple[Listen, ...]
    services: tuple[Service, ...]
    open_files: int
    user: str


def make_plan(environ: Mapping[str, str]) -> Plan:
    """Return the plan. Raises SettingsError with a sentence for each problem."""
    classes = discover()
    check_environment(classes, environ)
    served = {cls.service: load(cls, environ) for cls in classes if cls.service in _SERVED}
    listens = {name: _listen(settings) for name, settings in served.items()}
    checks = _checks_listen(served["admission"])
    environ = _environ(environ, listens, checks, load(EdgeSettings, environ))
    edge, run = load(EdgeSettings, environ), load(RunSettings, environ)
    graces = [settings.drain_grace_s for settings in served.values() if isinstance(settings, MeshSettings)]
    return Plan(
        environ=environ,
        edge=edge,
        run=run,
        paths=_paths(edge.state_dir),
        programs=programs(
            python=sys.executable,
            root=ROOT,
            grace_s=max(graces, default=0),
            edge_drain_s=edge.drain_notice_s + edge.drain_limit_s,
            tie=tie(),
        ),
        listens=(*listens.values(), checks, *_edge_listens(edge)),
        services=_services(edge),
        open_files=_open_files(),
        user=getpass.getuser(),
    )


def tie() -> tuple[str, ...]:
    """Return a command prefix that sends SIGTERM to a process when its parent dies; empty where the system has none."""
    prefix = ("setpriv", "--pdeathsig", "TERM", "--")
    if shutil.which("setpriv") and subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0:
        return prefix
    return ()


def _listen(settings: ServiceSettings) -> Listen:
    host, _, port = str(settings.listen).rpartition(":")  # type: ignore[attr-defined]  # every served room declares it
    return Listen(host.strip("[]"), int(port), f"{settings.prefix()}LISTEN")


def _checks_listen(admission: ServiceSettings) -> Listen:
    given = admission.checks_listen  # type: ignore[attr-defined]  # admission declares it
    host, _, port = str(given or beside(str(admission.listen))).rpartition(":")  # type: ignore[attr-defined]  # as above
    return Listen(host.strip("[]"), int(port), f"{admission.prefix()}CHECKS_LISTEN")


def _edge_listens(edge: EdgeSettings) -> tuple[Listen, ...]:
    return (
        Listen(edge.bind, edge.port, "OMNISERVE_EDGE_PORT"),
        Listen(edge.operator_bind, edge.operator_port, "OMNISERVE_EDGE_OPERATOR_PORT"),
        Listen(edge.mesh_bind, edge.mesh_port, "OMNISERVE_EDGE_MESH_PORT"),
        Listen("127.0.0.1", edge.admin_port, "OMNISERVE_EDGE_ADMIN_PORT"),
    )


def _environ(
    environ: Mapping[str, str], listens: Mapping[str, Listen], checks: Listen, edge: EdgeSettings
) -> dict[str, str]:
    """Return the processes' environment: on one host a service is called where it listens, unless told otherwise."""
    state_dir = load(RunSettings, environ).state_dir.resolve()
    addresses = {f"OMNISERVE_{name.upper()}_ADDRESS": _callable_address(each) for name, each in listens.items()}
    addresses["OMNISERVE_EDGE_ADMISSION_CHECKS_ADDRESS"] = _callable_address(checks)
    addresses["OMNISERVE_EDGE_ADDRESS"] = _callable_address(Listen(edge.operator_bind, edge.operator_port, ""))
    addresses["OMNISERVE_RELAY_MESH_LISTENER"] = _callable_address(Listen(edge.mesh_bind, edge.mesh_port, ""))
    addresses["OMNISERVE_PUBLIC_BASE"] = f"http://{_callable_address(Listen(edge.bind, edge.port, ''))}"
    envoy = Path(sys.executable).with_name("envoy")
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos" / "gen"), *filter(None, [environ.get("PYTHONPATH")])])
    defaults = {**addresses, "OMNISERVE_EDGE_ENVOY": str(envoy) if envoy.exists() else "envoy"}
    given = {name: value for name, value in environ.items() if value}
    return {**defaults, **given, "OMNISERVE_STATE_DIR": str(state_dir), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _callable_address(listen: Listen) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104 - looked for, not bound
    return f"[{host}]:{listen.port}" if ":" in host else f"{host}:{listen.port}"


def _services(edge: EdgeSettings) -> tuple[Service, ...]:
    door = f"127.0.0.1:{edge.port}" if edge.bind == "0.0.0.0" else f"{edge.bind}:{edge.port}"  # noqa: S104 - as above
    return (
        Service("admission", edge.admission_address, grpc_probe(edge.admission_address)),
        Service("vram", edge.vram_address, grpc_probe(edge.vram_address)),
        Service("relay", edge.relay_address, grpc_probe(edge.relay_address)),
        Service("llm", edge.llm_address, grpc_probe(edge.llm_address)),
        Service("diffusion", edge.diffusion_address, grpc_probe(edge.diffusion_address)),
        Service("jobs", edge.jobs_address, grpc_probe(edge.jobs_address)),
        Service("facade", edge.facade_address, http_probe(edge.facade_address, "/readyz"), asks=True),
        Service("envoy", door, http_probe(door, "/readyz"), asks=True),
    )


def _paths(state_dir: Path) -> Paths:
    folder = state_dir / "supervisor"
    socket = folder / "supervisor.sock"
    if len(os.fsencode(socket)) > _LONGEST_SOCKET:
        name = hashlib.sha256(os.fsencode(socket)).hexdigest()[:16]
        socket = Path(tempfile.gettempdir()) / f"omniserve-{name}.sock"
    return Paths(ROOT, folder / "supervisord.conf", socket, folder / "supervisord.pid", state_dir / "logs")


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
