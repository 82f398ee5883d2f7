"""The launcher's refusals: one clear line before anything is started."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def launch(tmp_path, free_ports):
    edge = ("EDGE_PORT", "EDGE_OPERATOR_PORT", "EDGE_MESH_PORT", "EDGE_ADMIN_PORT")
    names = (
        *edge,
        "ADMISSION_LISTEN",
        "ADMISSION_CHECKS_LISTEN",
        "VRAM_LISTEN",
        "RELAY_LISTEN",
        "LLM_LISTEN",
        "DIFFUSION_LISTEN",
        "JOBS_LISTEN",
        "FACADE_LISTEN",
    )
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))},
        "OMNISERVE_STATE_DIR": str(tmp_path / "state"),
        **{f"OMNISERVE_{n}": f"127.0.0.1:{p}" if n.endswith("LISTEN") else str(p) for n, p in ports.items()},
    }

    def run(*arguments, **variables):
        command = [sys.executable, "-m", "deploy.run", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env={**environ, **variables}, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_an_unknown_variable_stops_the_start_with_the_nearest_name(launch):
    result = launch(OMNISERVE_EDGE_PROT="8791")
    assert result.returncode == 2
    assert "OMNISERVE_EDGE_PROT: no such setting; did you mean OMNISERVE_EDGE_PORT?" in result.stderr


def test_an_open_address_for_anonymous_callers_stops_the_start(launch):
    result = launch(OMNISERVE_BIND="0.0.0.0")
    assert result.returncode == 2
    assert "OMNISERVE_ALLOW_ANONYMOUS=1" in result.stderr


@pytest.mark.parametrize("variable", ["OMNISERVE_EDGE_PORT", "OMNISERVE_LLM_LISTEN"])
def test_a_port_in_use_is_one_line_with_its_number_and_setting(launch, variable):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        result = launch(**{variable: str(port) if variable.endswith("PORT") else f"127.0.0.1:{port}"})
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"port {port} is already in use" in line
    assert variable in line


def test_stopping_what_does_not_run_is_no_error(launch):
    result = launch("down")
    assert (result.returncode, result.stderr) == (0, "")
    assert "is not running" in result.stdout


def test_restarting_what_does_not_run_says_so(launch):
    result = launch("restart", "llm")
    assert result.returncode == 1
    assert "no supervisord answers" in result.stderr
