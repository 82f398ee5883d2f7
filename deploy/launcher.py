"""Starts the mesh under supervisord, waits until it is ready, stops it."""

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy import edge
from deploy.control import NotRunningError, Supervisor
from deploy.plan import TOKENS, Plan, Service, tie
from deploy.programs import supervisord_configuration
from services.kit.tokens import ensure_token

_POLL_S = 0.2
_LOOK_S = 2.0  # for starts that fail: each look costs supervisord more than a probe costs a service
_FAILED_STARTS = 3
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A service that does not become ready, and why."""

    service: str
    why: str


def prepare(plan: Plan) -> None:
    """Write everything the processes read: tokens, Envoy's and supervisord's configuration."""
    for folder in (plan.paths.configuration.parent, plan.paths.logs):
        folder.mkdir(parents=True, exist_ok=True)
    for token in TOKENS:
        ensure_token(plan.edge.state_dir, token)
    edge.write(plan.edge)
    text = supervisord_configuration(plan.programs, plan.paths, open_files=plan.open_files, user=plan.user)
    plan.paths.configuration.write_text(text, encoding="utf-8")


def start(plan: Plan, *, tied: bool) -> subprocess.Popen[bytes]:
    """Start supervisord in a session of its own, out of reach of the terminal's Ctrl-C.

    `tied`: it drains and stops when this process dies, however it dies.
    """
    supervisord = Path(sys.executable).with_name("supervisord")
    command = [*(tie() if tied else ()), str(supervisord), "-c", str(plan.paths.configuration)]
    with (plan.paths.logs / "supervisord.stderr.log").open("wb") as errors:
        return subprocess.Popen(
            command,
            env=dict(plan.environ),
            cwd=plan.paths.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def wait_ready(
    plan: Plan,
    *,
    on_ready: Callable[[Service, float], None],
    stopped: Callable[[], bool],
    alive: Callable[[], bool],
) -> GaveUp | None:
    """Wait until every service is ready; `on_ready` hears of each with the seconds it took.

    Returns None when all are ready or `stopped()`, else the first service that will not be: it ended three times, or it
    took longer than the settings allow, or supervisord itself is gone (`alive()` is False).
    """
    began = looked = time.monotonic()
    pending = list(plan.services)
    deaths: defaultdict[str, set[int]] = defaultdict(set)
    while pending and not stopped():
        if not alive():
            return GaveUp("supervisord", "ended by itself")
        for service in tuple(pending):
            if (not service.asks or service is pending[0]) and service.probe():
                pending.remove(service)
                on_ready(service, time.monotonic() - began)
        if time.monotonic() - looked >= _LOOK_S:
            looked = time.monotonic()
            if (failed := _failed(plan, pending, deaths)) is not None:
                return failed
        if pending and time.monotonic() - began > plan.run.ready_timeout_s:
            return GaveUp(
                pending[0].name, f"was not ready after {plan.run.ready_timeout_s:g} s (OMNISERVE_RUN_READY_TIMEOUT_S)"
            )
        time.sleep(_POLL_S)
    return None


def _failed(plan: Plan, pending: list[Service], deaths: defaultdict[str, set[int]]) -> GaveUp | None:
    try:
        processes = Supervisor(plan.paths.socket).processes()
    except NotRunningError:
        return None  # it has not opened its socket yet
    for service in pending:
        process = processes[service.name]
        if process.ended_at:
            deaths[service.name].add(process.ended_at)
        if len(deaths[service.name]) >= _FAILED_STARTS:
            return GaveUp(service.name, f"ended {_FAILED_STARTS} times")
    return None


def log_sizes(plan: Plan) -> dict[str, int]:
    """Return how long each program's log is now, bytes: what comes later belongs to this start."""
    logs = {each.name: plan.paths.log(each.name) for each in plan.programs}
    return {name: log.stat().st_size if log.exists() else 0 for name, log in logs.items()}


def tail(path: Path, since: int = 0) -> list[str]:
    """Return the last lines of a log after `since` bytes; of all of it when it was rotated meanwhile; none without one."""
    if not path.exists():
        return []
    content = path.read_bytes()
    return content[since if since <= len(content) else 0 :].decode(errors="replace").splitlines()[-_TAIL_LINES:]
