"""The `omniserve` command against the whole mesh: Envoy, all services, a real model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
Omniserve = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def omniserve(mesh) -> Omniserve:
    """Runs the command with the settings of the running mesh."""

    def run(*arguments: str, piped: str | None = None, **extra: str) -> "subprocess.CompletedProcess[str]":
        environ = {
            **mesh.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **extra,
        }
        return subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments],
            cwd=ROOT,
            env=environ,
            input=piped,
            stdin=subprocess.DEVNULL if piped is None else None,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    return run


def test_the_capital_of_france_is_paris(omniserve):
    done = omniserve("chat", "What is the capital of France?", "--temperature", "0", "--stats")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr


def test_a_pipe_and_a_limit(omniserve):
    done = omniserve("chat", "--max-tokens", "3", "--temperature", "0", piped="Count from one to one hundred.")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "token limit" in done.stderr


def test_an_unknown_model_is_refused_in_one_line(omniserve):
    done = omniserve("chat", "Hi", "--model", "no-such-model")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no-such-model" in done.stderr
    assert "not_found" in done.stderr


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(omniserve):
    done = omniserve("chat", piped="word " * 30_000)
    assert done.returncode == 1
    assert "context_length_exceeded" in done.stderr


def test_the_served_model_is_listed_and_ready(omniserve):
    done = omniserve("models", "list")
    assert done.returncode == 0, done.stderr
    header, model, *_ = done.stdout.splitlines()
    assert header.split()[:3] == ["MODEL", "KIND", "STATE"]
    assert model.split()[1:3] == ["chat", "ready"]


def test_status_shows_every_service_of_a_well_mesh(omniserve, mesh):
    done = omniserve("status")
    assert done.returncode == 0, done.stderr
    services = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert {"admission/gpu0", "admission/cpu", "llm"} <= services.keys()
    assert "0/16" in services["admission/gpu0"]
    assert "(ready" in services["llm"]
    assert mesh.address("llm") in services["llm"]


def test_status_as_json_is_what_the_mesh_says(omniserve):
    done = omniserve("status", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "ok"


def test_the_public_door_shows_the_state_too(omniserve, mesh):
    done = omniserve("status", "--url", mesh.public_url)
    assert done.returncode == 0, done.stderr
    assert mesh.public_url in done.stdout


def test_doctor_knows_the_ports_and_tokens_of_the_running_mesh(omniserve, mesh):
    done = omniserve("doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert findings["ports"]["level"] == "ok", findings["ports"]
    assert mesh.environ["OMNISERVE_EDGE_PORT"] in findings["ports"]["seen"].partition("in use by this mesh")[2]
    assert findings["tokens"]["level"] == "ok", findings["tokens"]
    assert "services" in findings["tokens"]["seen"]
