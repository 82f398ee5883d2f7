"""`omniserve doctor` on the machine that runs the tests: every probe looks at something real."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Doctor = Callable[..., tuple[int, dict[str, list[dict[str, str]]]]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    def run(**extra: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))}
        environ = inherited | {"OMNISERVE_STATE_DIR": str(tmp_path / "run"), "PYTHONPATH": str(ROOT), **extra}
        command = [sys.executable, "-m", "cli.main", "doctor", "--json"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90, check=False)
        assert "Traceback" not in done.stderr
        found: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(done.stdout):
            found.setdefault(finding["subject"], []).append(finding)
        return done.returncode, found

    return run


def level(found, subject: str) -> set[str]:
    return {finding["level"] for finding in found[subject]}


def test_a_checkout_that_was_set_up_is_well(doctor):
    _, found = doctor()
    for subject in ("python", "packages", "stubs", "engine", "envoy", "model", "settings", "state", "tokens", "traces"):
        assert level(found, subject) == {"ok"}, found[subject]


def test_everything_that_was_spoilt_is_found_and_the_status_says_so(doctor, tmp_path, foreign_listener):
    tokens = tmp_path / "run" / "tokens"
    tokens.mkdir(parents=True, mode=0o700)
    (tokens / "llm").write_text("x" * 40)
    (tokens / "llm").chmod(0o644)
    (tmp_path / "broken.gguf").write_bytes(b"<html>")
    status, found = doctor(
        OMNISERVE_EDGE_PORT=str(foreign_listener),
        OMNISERVE_EDGE_ENVOY="/nowhere/envoy",
        OMNISERVE_LLM_GGUF=str(tmp_path / "broken.gguf"),
        OMNISERVE_LLM_NGL="20",
        OMNISERVE_LLM_GUF="typo",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )
    assert status == 1
    for subject in ("tokens", "envoy", "settings", "ports", "model"):
        assert level(found, subject) == {"fail"}, found[subject]
    assert level(found, "traces") == {"warn"}
    assert all(finding["mend"] for findings in found.values() for finding in findings if finding["level"] != "ok")
    assert str(foreign_listener) in found["ports"][0]["seen"]


@pytest.fixture
def foreign_listener():
    """A port held by a program that does not belong to the mesh."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        os.set_inheritable(listening.fileno(), True)
        holder = subprocess.Popen(["sleep", "100"], cwd=ROOT, close_fds=False)
        port = listening.getsockname()[1]
    yield port
    holder.kill()
    holder.wait()
