"""Which processes make up the mesh on one host, and supervisord's configuration for them. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LOG_BYTES = 32 * 1024 * 1024
_LOG_FILES = 4
# A process that lives shorter than this counts as a failed start: the next start waits a second longer each time.
_START_S = 5
# Never give up: the delay grows with each failed start, and a mended setting must not need a restart of everything.
_START_RETRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class Program:
    """One supervised process. `stop_wait_s`: how long it may drain before it is killed, seconds."""

    name: str
    command: tuple[str, ...]
    stop_wait_s: int


@dataclass(frozen=True, slots=True)
class Paths:
    """Where supervisord keeps its files. `socket` must be short: a Unix socket's path has about 100 bytes."""

    root: Path
    configuration: Path
    socket: Path
    pid_file: Path
    logs: Path

    def log(self, name: str) -> Path:
        """Return the log file of a program."""
        return self.logs / f"{name}.log"


def programs(*, python: str, root: Path, grace_s: float, edge_drain_s: int, tie: Sequence[str]) -> tuple[Program, ...]:
    """Return the processes in the order they start; they stop in reverse, each before the next, so Envoy first.

    `grace_s` and `edge_drain_s`: the longest drain of a service and of Envoy. `tie`: a command prefix that ends a process
    with its parent.
    """
    services = [
        (name, ("-m", f"services.{name}")) for name in ("admission", "vram", "relay", "llm", "diffusion", "jobs")
    ]
    modules = [*services, ("facade", ("-m", "facade"))]
    wait_s = int(grace_s) + 7
    return (
        *(Program(name, (*tie, python, *module), wait_s) for name, module in modules),
        Program("envoy", (*tie, "bash", str(root / "envoy" / "run.sh")), edge_drain_s + 10),
    )


def supervisord_configuration(programs: Sequence[Program], paths: Paths, *, open_files: int, user: str) -> str:
    """Return supervisord's configuration. `open_files`: descriptors the processes may open; `user`: who runs them."""
    head = _section(
        "supervisord",
        {
            "nodaemon": "true",
            "user": user,
            "logfile": paths.log("supervisord"),
            "logfile_maxbytes": _LOG_BYTES,
            "logfile_backups": _LOG_FILES - 1,
            "pidfile": paths.pid_file,
            "childlogdir": paths.logs,
            "minfds": open_files,
        },
    )
    control = [
        _section("unix_http_server", {"file": paths.socket, "chmod": "0700"}),
        _section("supervisorctl", {"serverurl": f"unix://{paths.socket}"}),
        _section(
            "rpcinterface:supervisor",
            {"supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"},
        ),
    ]
    return "\n".join([head, *control, *(_program(each, place, paths) for place, each in enumerate(programs, 1))])


def _program(program: Program, place: int, paths: Paths) -> str:
    return _section(
        f"program:{program.name}",
        {
            "command": shlex.join(program.command),
            "directory": paths.root,
            "priority": place * 10,
            "autostart": "true",
            "autorestart": "true",
            "startsecs": _START_S,
            "startretries": _START_RETRIES,
            "stopsignal": "TERM",
            "stopwaitsecs": program.stop_wait_s,
            "killasgroup": "true",
            "redirect_stderr": "true",
            "stdout_logfile": paths.log(program.name),
            "stdout_logfile_maxbytes": _LOG_BYTES,
            "stdout_logfile_backups": _LOG_FILES - 1,
        },
    )


def _section(name: str, values: dict[str, object]) -> str:
    lines = [f"{key}={str(value).replace('%', '%%')}" for key, value in values.items()]  # supervisord expands `%`
    return "\n".join([f"[{name}]", *lines, ""])
