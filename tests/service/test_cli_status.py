"""`omniserve status` and `models list` against a real HTTP server that answers what each scenario says."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:1"
HEALTH = {"status": "ok", "services": {"admission": {"status": "serving"}, "llm": {"status": "serving"}}}
STATUS = {"status": "ok", "services": {"admission": {"pools": [{"name": "gpu0", "slots": 16, "in_use": 1}]}, "llm": {}}}
NOT_FOUND = (404, {"error": {"message": "No such route.", "reason": "not_found"}})


class Handler(BaseHTTPRequestHandler):
    server: "Door"

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        status, body = self.server.answers.get(self.path, NOT_FOUND)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class Door(ThreadingHTTPServer):
    daemon_threads = True
    answers: dict[str, tuple[int, object]]
    keys: list[str | None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def door() -> Iterator[Door]:
    with Door(("127.0.0.1", 0), Handler) as running:
        running.answers = {"/health": (200, HEALTH), "/status": (200, STATUS)}
        running.keys = []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


Omniserve = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def omniserve(door: Door) -> Omniserve:
    def run(*arguments: str, **extra: str) -> "subprocess.CompletedProcess[str]":
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNISERVE_")}
        environ |= {
            "OMNISERVE_CLI_URL": door.url,
            "OMNISERVE_CLI_OPERATOR_URL": NOBODY,
            "PYTHONPATH": str(ROOT),
            **extra,
        }
        command = [sys.executable, "-m", "cli.main", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_the_public_door_is_asked_when_the_operators_does_not_answer(door, omniserve):
    done = omniserve("status", OMNISERVE_API_KEY="sesame")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == ["SERVICE", "STATE", "ADDRESS", "QUEUE", "SLOTS", "MODEL", "TOKENS"]
    assert "admission/gpu0" in done.stdout
    assert door.url in done.stdout
    assert set(door.keys) == {"Bearer sesame"}


def test_the_operators_door_comes_first(door, omniserve):
    assert omniserve("status", OMNISERVE_CLI_OPERATOR_URL=door.url, OMNISERVE_CLI_URL=NOBODY).returncode == 0


def test_an_address_that_is_given_is_the_only_one_asked(omniserve):
    done = omniserve("status", "--url", NOBODY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "start the mesh with `make run`" in done.stderr


def test_a_door_that_keeps_its_numbers_to_itself_still_shows_states(door, omniserve):
    door.answers["/status"] = (401, {"error": {"message": "A key is required."}})
    done = omniserve("status")
    assert done.returncode == 0
    assert "llm" in done.stdout


def test_a_degraded_mesh_is_shown_and_is_exit_status_1(door, omniserve):
    door.answers["/health"] = (200, {"status": "degraded", "services": {"llm": {"status": "not_serving"}}})
    done = omniserve("status")
    assert done.returncode == 1
    assert "not serving" in done.stdout
    assert done.stderr.startswith("omniserve: degraded: llm is not serving; ")


def test_a_watcher_sees_the_mesh_change_until_ctrl_c(door):
    master, slave = pty.openpty()
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160"}
    command = [sys.executable, "-m", "cli.main", "status", "--watch", "--url", door.url]
    with subprocess.Popen(command, env=environ, stdin=slave, stdout=slave, stderr=slave) as watcher:
        read_until(master, "all is well")
        door.answers["/health"] = (200, {"status": "degraded", "services": {"llm": {"status": "unreachable"}}})
        read_until(master, "degraded: llm is unreachable")
        door.answers["/health"] = (503, {"error": {"message": "It may be starting.", "reason": "no_capacity"}})
        read_until(master, "It may be starting.")
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(30) == 0
    os.close(slave)
    os.close(master)


def read_until(terminal: int, text: str) -> None:
    screen = ""
    while text not in screen:
        assert select.select([terminal], [], [], 30)[0], f"{text!r} never came: {screen!r}"
        screen += os.read(terminal, 65536).decode(errors="replace")


def test_json_is_the_meshs_own_answer(door, omniserve):
    assert json.loads(omniserve("status", "--json").stdout) == STATUS


def test_a_door_without_a_facade_behind_it_is_one_line(door, omniserve):
    door.answers["/health"] = (503, {"error": {"message": "It may be starting.", "reason": "no_capacity"}})
    done = omniserve("status")
    assert (done.returncode, done.stderr) == (1, "omniserve: It may be starting. [no_capacity, HTTP 503]\n")


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b""])
def test_something_else_behind_the_address_is_recognised(door, omniserve, body):
    door.answers["/health"] = door.answers["/v1/models"] = (200, body)
    for command in (("status",), ("models", "list")):
        done = omniserve(*command)
        assert done.returncode == 1
        assert "is this the mesh's address?" in done.stderr


def test_served_models_are_listed(door, omniserve):
    extra = {"kind": "chat", "state": "ready", "size_mib": 94, "context_tokens": 8192, "quantisation": "Q4_1"}
    extra |= {"memory_mib": 300, "ttl_ms": 60_000}
    door.answers["/v1/models"] = (200, {"object": "list", "data": [{"id": "m1", "omniserve": extra}]})
    done = omniserve("models", "list")
    row = "m1 chat ready 8192 94.0 MiB 300.0 MiB 60 s Q4_1 -"
    assert done.stdout.splitlines()[1].split() == row.split()
    assert json.loads(omniserve("models", "list", "--json").stdout)[0]["id"] == "m1"


def test_local_models_need_no_mesh(omniserve, tmp_path):
    done = omniserve("models", "list", "--local", OMNISERVE_MODELS_DIR=str(tmp_path))
    assert done.returncode == 0
    assert "omniserve models pull" in done.stdout
