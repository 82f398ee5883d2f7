"""Runs the mesh on this host: `python -m deploy.run [foreground | up | down | restart NAME]`.

foreground (the default) stays until Ctrl-C or SIGTERM, then drains everything, the front door first, and exits 0; a second
signal hurries. `up` leaves the mesh running in the background, `down` drains and stops it.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from subprocess import Popen

from deploy import ports
from deploy.control import DOOR, NotRunningError, Process, Supervisor, UnknownProgramError
from deploy.launcher import GaveUp, log_sizes, prepare, start, tail, wait_ready
from deploy.plan import Plan, Service, make_plan
from deploy.readiness import http_get
from services.kit.settings import SettingsError

_FAILED = 1
_BAD_SETTINGS = 2
_POLL_S = 0.2
_WATCH_S = 3.0  # each look costs supervisord as much as a request costs a service
# Without one of these there is no model that makes pictures.
_PICTURE_MODELS = (
    "OMNISERVE_SD_MODEL",
    "OMNISERVE_SD_DIFFUSION_MODEL",
    "OMNISERVE_DIFFUSION_MODEL",
    "OMNISERVE_DIFFUSION_DIFFUSION_MODEL",
)
_NO_PICTURES = (
    "There is no model that makes pictures yet. `omniserve models pull leejet/Z-Image-Turbo-GGUF`, for example, fetches one;\n"
    "services/diffusion/README.md names three and the variables that serve them."
)


class _Signals:
    """Counts stop signals; the first drains, the second hurries."""

    def __init__(self) -> None:
        self.count = 0
        self._came = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._heard)

    def _heard(self, _number: int, _frame: object) -> None:
        self.count += 1
        self._came.set()

    def wait(self, seconds: float) -> None:
        """Return when one has come, or after `seconds`."""
        self._came.wait(seconds)


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 settings that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m deploy.run", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    for name in ("foreground", "up", "down"):
        commands.add_parser(name)
    commands.add_parser("restart").add_argument("name")
    chosen = parser.parse_args(arguments)
    try:
        plan = make_plan(os.environ if environ is None else environ)
    except SettingsError as error:
        return _complain(*error.problems, status=_BAD_SETTINGS)
    if chosen.command == "down":
        return _down(plan)
    if chosen.command == "restart":
        return _restart(plan, chosen.name)
    return _start(plan, foreground=chosen.command != "up")


def _start(plan: Plan, *, foreground: bool) -> int:
    supervisor = Supervisor(plan.paths.socket)
    with suppress(NotRunningError):
        pid = supervisor.pid()
        return _complain(f"the mesh of {plan.edge.state_dir} is already running (pid {pid}); `make down` stops it")
    if taken := ports.problems(plan.listens):
        return _complain(*taken)
    signals = _Signals()
    marks = log_sizes(plan)
    prepare(plan)
    supervisord = start(plan, tied=foreground)
    failure = wait_ready(
        plan,
        on_ready=lambda service, seconds: _say(f"{service.name:<10} ready {seconds:5.1f} s  {service.where}"),
        stopped=lambda: signals.count > 0,
        alive=lambda: supervisord.poll() is None,
    )
    if failure is not None:
        _explain(plan, failure, marks)
        supervisord.terminate()
        supervisord.wait()
        return _FAILED
    if signals.count == 0:
        _invite(plan, foreground=foreground)
        if not foreground:
            return 0
        _watch(supervisor, supervisord, signals)
    if supervisord.poll() is not None:
        return _complain("supervisord ended by itself", *tail(plan.paths.log("supervisord")))
    return _drain(supervisor, supervisord, signals)


def _watch(supervisor: Supervisor, supervisord: Popen[bytes], signals: _Signals) -> None:
    """Report what happens to the processes until a signal comes or supervisord ends."""
    known: dict[str, Process] = {}
    while signals.count == 0 and supervisord.poll() is None:
        with suppress(NotRunningError):
            now = supervisor.processes()
            for name, process in now.items():
                if line := _change(known.get(name), process):
                    _say(f"{name:<10} {line}")
            known = now
        signals.wait(_WATCH_S)


def _change(before: Process | None, now: Process) -> str | None:
    if before is None or before.pid == now.pid:
        return None
    if now.pid == 0:
        return "ended; it will be started again, its log says why"
    return f"started again (pid {now.pid})"


def _drain(supervisor: Supervisor, supervisord: Popen[bytes], signals: _Signals) -> int:
    _say("Draining: the front door closes, running requests may end. Once more to hurry.")
    pids: list[int] = []
    with suppress(NotRunningError):
        pids = [process.pid for process in supervisor.processes().values() if process.pid]
    supervisord.terminate()
    heard = signals.count
    while supervisord.poll() is None:
        if signals.count > heard:
            heard = signals.count
            _hurry(pids)
        time.sleep(_POLL_S)
    _say("Stopped.")
    return 0


def _hurry(pids: Sequence[int]) -> None:
    """Signal every process twice: the first signal drains, the second (SIGINT, as uvicorn wants it) ends the waiting."""
    for number in (signal.SIGTERM, signal.SIGINT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(_POLL_S)


def _down(plan: Plan) -> int:
    try:
        pid = Supervisor(plan.paths.socket).pid()
    except NotRunningError:
        _say(f"The mesh of {plan.edge.state_dir} is not running.")
        return 0
    _say("Draining: the front door closes, running requests may end.")
    os.kill(pid, signal.SIGTERM)
    while _exists(pid):
        time.sleep(_POLL_S)
    _say("Stopped.")
    return 0


def _restart(plan: Plan, name: str) -> int:
    marks = log_sizes(plan)
    before = _generation(plan) if name == DOOR else None
    try:
        Supervisor(plan.paths.socket).restart(name)
    except (NotRunningError, UnknownProgramError) as error:
        return _complain(str(error))
    service = next(each for each in plan.services if each.name == name)
    ends = time.monotonic() + plan.run.ready_timeout_s
    while (before is not None and _generation(plan) in {before, None}) or not service.probe():
        if time.monotonic() > ends:
            _explain(plan, GaveUp(name, f"was not ready after {plan.run.ready_timeout_s:g} s"), marks)
            return _FAILED
        time.sleep(_POLL_S)
    _say(f"{name:<10} ready again")
    return 0


def _generation(plan: Plan) -> int | None:
    """Return which Envoy in a row answers, None when none does."""
    try:
        _, body = http_get(f"127.0.0.1:{plan.edge.admin_port}", "/server_info")
        return int(json.loads(body)["command_line_options"]["restart_epoch"])
    except (OSError, HTTPException, ValueError, KeyError):
        return None


def _invite(plan: Plan, *, foreground: bool) -> None:
    door = f"http://{_door(plan).where}"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": _first_model(plan), "messages": question, "temperature": 0}
    _say(f"\nThe mesh is ready: {door} (operator: http://127.0.0.1:{plan.edge.operator_port}; logs: {plan.paths.logs})")
    if not any(plan.environ.get(name) for name in _PICTURE_MODELS):
        _say(_NO_PICTURES)
    _say(f"Try:\n  curl {door}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'")
    _say("Ctrl-C drains and stops." if foreground else "`make down` drains and stops, `make logs` follows the logs.")


def _first_model(plan: Plan) -> str:
    with suppress(OSError, HTTPException, ValueError, LookupError, TypeError):
        return str(json.loads(http_get(_door(plan).where, "/v1/models")[1])["data"][0]["id"])
    return "default"


def _door(plan: Plan) -> Service:
    return next(each for each in plan.services if each.name == "envoy")


def _explain(plan: Plan, failure: GaveUp, marks: Mapping[str, int]) -> None:
    log = plan.paths.log(failure.service)
    lines = tail(log, marks.get(failure.service, 0))
    _complain(f"{failure.service} {failure.why}. The end of {log}:", *(f"  {line}" for line in lines))


def _complain(*sentences: str, status: int = _FAILED) -> int:
    sys.stderr.writelines(f"{sentence}\n" for sentence in sentences)
    return status


def _say(line: str) -> None:
    print(line, flush=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
