"""Proves the compose file: `make compose-test` builds and starts it for real, and removes it again.

Under a project name, an image name and ports of its own: a chat goes through the published front door with a trace id that
is then looked up in Jaeger, with a span of everybody it passed; callers need the key that the first start made; a stop
drains, with exit status 0 everywhere.
"""

import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT: Final = Path(__file__).resolve().parents[2]
# Whom a chat passes. Admission is no hop of it: llm asks for the permit on a session stream that all its requests share.
TRACED: Final = frozenset({"envoy", "facade", "llm"})
_READY_LIMIT_S: Final = 180.0
_TRACE_LIMIT_S: Final = 60.0

T = TypeVar("T")


class CheckFailedError(Exception):
    """What was promised did not hold."""


@dataclass(frozen=True, slots=True)
class Project:
    """A compose project with names and ports of its own."""

    name: str
    port: int
    operator_port: int
    jaeger_port: int

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables that the compose file reads."""
        return {
            **os.environ,
            "OMNISERVE_IMAGE": f"{self.name}:test",
            "OMNISERVE_EDGE_PORT": str(self.port),
            "OMNISERVE_EDGE_OPERATOR_PORT": str(self.operator_port),
            "OMNISERVE_JAEGER_PORT": str(self.jaeger_port),
        }

    def compose(self, *arguments: str, capture: bool = False) -> str:
        """Run one compose command; return its output when captured. Raises CheckFailedError when it fails."""
        command = ["docker", "compose", "--project-name", self.name, *arguments]
        result = subprocess.run(command, cwd=ROOT, env=self.environ, check=False, text=True, capture_output=capture)
        if result.returncode != 0:
            raise CheckFailedError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr or ''}")
        return result.stdout or ""


def main() -> int:
    """Run the check; return the exit status."""
    project = Project(f"omniserve-test-{secrets.token_hex(4)}", *_free_ports(3))
    try:
        with _up(project):
            _check(project)
    except CheckFailedError as error:
        sys.stderr.write(f"compose-test failed: {error}\n")
        return 1
    print("compose-test passed")
    return 0


@contextmanager
def _up(project: Project) -> Iterator[None]:
    try:
        _timed("build", lambda: project.compose("build"))
        _timed("up", lambda: project.compose("up", "--detach"))
        yield
    except CheckFailedError:
        subprocess.run(["docker", "compose", "-p", project.name, "logs", "--tail", "40"], cwd=ROOT, check=False)
        _show_health(project)
        raise
    finally:
        project.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")
        subprocess.run(["docker", "image", "rm", "--force", f"{project.name}:test"], check=False, capture_output=True)


def _show_health(project: Project) -> None:
    """Print what each container's health checks said."""
    ids = project.compose("ps", "--all", "--quiet", capture=True).split()
    shape = '{{index .Config.Labels "com.docker.compose.service"}} {{json .State.Health}}'
    subprocess.run(["docker", "inspect", "--format", shape, *ids], check=False)


def _check(project: Project) -> None:
    _timed(
        "ready", lambda: _until(lambda: _status(project.port, "/readyz") == http.HTTPStatus.OK, "ready", _READY_LIMIT_S)
    )
    key = _first_key(project)
    trace_id = secrets.token_hex(16)
    refused, _ = _ask(project.port, secrets.token_hex(16), key="")
    _demand(refused == http.HTTPStatus.UNAUTHORIZED, "callers without a key are refused")
    print(f"chat: {_chat(project.port, trace_id, key)!r}")
    found = _timed("trace", lambda: _trace(project.jaeger_port, trace_id))
    print(f"trace {trace_id}: spans of {', '.join(sorted(found))}")
    _demand(
        _status(project.operator_port, "/status") == http.HTTPStatus.OK, "the operator listener answers on loopback"
    )
    _demand(_status(project.port, "/admin/hold", key) == http.HTTPStatus.NOT_FOUND, "operator paths are not public")
    _only_on_loopback(project)
    _timed("stop", lambda: project.compose("stop"))
    _stopped_well(project)


def _first_key(project: Project) -> str:
    """Return the key that the first start made, read as its log says."""
    log = project.compose("logs", "--no-log-prefix", "setup", capture=True)
    _, found, path = log.partition("docker compose exec facade cat ")
    _demand(bool(found), "the first start says how to read the key")
    key = project.compose("exec", "-T", "facade", "cat", path.split()[0], capture=True).strip()
    _demand(bool(key) and key not in log, "the key itself is not in the log")
    return key


def _chat(port: int, trace_id: str, key: str) -> str:
    status, body = _ask(port, trace_id, key)
    _demand(status == http.HTTPStatus.OK, f"a chat is answered ({status} {body[:500]!r})")
    answer = str(json.loads(body)["choices"][0]["message"]["content"])
    _demand("Paris" in answer, f"the capital of France is Paris ({answer!r})")
    return answer


def _ask(port: int, trace_id: str, key: str) -> tuple[int, bytes]:
    question = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 32,
    }
    headers = {"content-type": "application/json", "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(question), headers)
        response = connection.getresponse()
        return response.status, response.read()


def _trace(port: int, trace_id: str) -> set[str]:
    """Wait until the trace has a span of every service; return whose spans it has."""
    found: set[str] = set()

    def complete() -> bool:
        found.update(_services_of(port, trace_id))
        return found >= TRACED

    try:
        _until(complete, f"the whole trace {trace_id} in Jaeger", _TRACE_LIMIT_S)
    except CheckFailedError as error:
        raise CheckFailedError(f"{error}; no span of {', '.join(sorted(TRACED - found))}") from None
    return found


def _services_of(port: int, trace_id: str) -> set[str]:
    traces = _json(port, "/api/traces?service=envoy&limit=200")["data"]
    return {_service_of(span, trace) for trace in traces if trace["traceID"] == trace_id for span in trace["spans"]}


def _service_of(span: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    """Return whose span it is: Jaeger names a process that the trace describes, simpler stores name the service itself."""
    if "processID" in span:
        return str(trace["processes"][span["processID"]]["serviceName"])
    return str(span["service"])


def _only_on_loopback(project: Project) -> None:
    published = project.compose("ps", "--format", "json", capture=True)
    rows = [json.loads(line) for line in published.splitlines()]
    containers = [each for row in rows for each in (row if isinstance(row, list) else [row])]
    binds = {port["URL"] for each in containers for port in each["Publishers"] or [] if port["PublishedPort"]}
    _demand(binds == {"127.0.0.1"}, f"everything is published on loopback only ({binds})")


def _stopped_well(project: Project) -> None:
    ids = project.compose(
        "ps",
        "--all",
        "--quiet",
        "setup",
        "admission",
        "vram",
        "relay",
        "llm",
        "diffusion",
        "jobs",
        "facade",
        "envoy",
        capture=True,
    ).split()
    shape = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.ExitCode}}'
    lines = subprocess.run(
        ["docker", "inspect", "--format", shape, *ids], check=True, text=True, capture_output=True
    ).stdout
    ends = dict(line.split() for line in lines.splitlines())
    _demand(set(ends.values()) == {"0"}, f"everything drained and ended with status 0 ({ends})")


def _status(port: int, path: str, key: str = "") -> int:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
            return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0


def _json(port: int, path: str) -> Any:  # noqa: ANN401 - JSON
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())


def _until(condition: Callable[[], bool], what: str, limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > ends:
            raise CheckFailedError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.5)


def _demand(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise CheckFailedError(f"not so: {what}")
    print(f"ok: {what}")


def _timed(what: str, work: Callable[[], T]) -> T:
    began = time.monotonic()
    result = work()
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)
    return result


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    sys.exit(main())
