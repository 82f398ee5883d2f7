"""The launcher with the whole mesh: ready lines, restarts, a clean end, and nothing left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("admission", "vram", "relay", "llm", "diffusion", "jobs", "facade", "envoy")


def family(mesh):
    """Return every process below the launcher, supervisord included."""
    return psutil.Process(mesh.launcher.pid).children(recursive=True)


def gone(processes):
    return not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def chat(mesh, **more):
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, **more}
    return httpx.post(f"{mesh.public_url}/v1/chat/completions", json=body, timeout=60)


def test_the_launcher_names_each_service_as_it_becomes_ready_and_what_to_try(mesh):
    output = mesh.output.read_text()
    for service in SERVICES:
        assert f"{service:<10} ready" in output
    assert f"curl {mesh.public_url}/v1/chat/completions" in output


def test_the_curl_line_that_it_prints_works(mesh):
    output = mesh.output.read_text()
    command = output[output.index("  curl ") : output.index("Ctrl-C")].strip()
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in result.stdout


def test_a_crashed_envoy_comes_back(mesh):
    old = mesh.kill("envoy")
    mesh.wait_replaced("envoy", old)
    assert chat(mesh).status_code == 200


def test_a_second_start_in_the_same_state_directory_is_refused(mesh):
    again = subprocess.run(
        [sys.executable, "-m", "deploy.run"],
        cwd=ROOT,
        env=dict(mesh.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 1
    assert "already running" in again.stderr


def test_ctrl_c_lets_a_running_stream_end_and_stops_everything(make_mesh, tmp_path):
    # As long as the answer takes on a crowded machine: a stream that is cut at the end of the grace is another scenario.
    patience = {"OMNISERVE_DRAIN_GRACE_S": "60", "OMNISERVE_EDGE_DRAIN_LIMIT_S": "90"}
    with make_mesh(tmp_path, OMNISERVE_EMBEDDING_GGUF="none", **patience) as mesh:
        processes = family(mesh)
        body = {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 200,
            "stream": True,
            "temperature": 0,
        }
        with httpx.stream("POST", f"{mesh.public_url}/v1/chat/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            mesh.launcher.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert mesh.launcher.wait(120) == 0
        assert gone(processes)


def test_nothing_outlives_a_launcher_that_is_killed(make_mesh, tmp_path, wait_until):
    with make_mesh(tmp_path, OMNISERVE_EMBEDDING_GGUF="none") as mesh:
        processes = family(mesh)
        mesh.launcher.kill()
        wait_until(lambda: gone(processes), "every process has ended")


def test_nothing_outlives_a_supervisord_that_is_killed(make_mesh, tmp_path, wait_until):
    with make_mesh(tmp_path, OMNISERVE_EMBEDDING_GGUF="none") as mesh:
        processes = family(mesh)
        next(each for each in processes if "supervisord" in " ".join(each.cmdline())).kill()
        assert mesh.launcher.wait(120) == 1
        assert "supervisord ended by itself" in mesh.output.read_text()
        wait_until(lambda: gone(processes), "every process has ended")


def test_a_service_that_cannot_start_ends_the_start_with_the_end_of_its_log(mesh_environ, tmp_path):
    environ = mesh_environ(
        tmp_path, OMNISERVE_LLM_GGUF=str(tmp_path / "missing.gguf"), OMNISERVE_RUN_READY_TIMEOUT_S="200"
    )
    result = subprocess.run(
        [sys.executable, "-m", "deploy.run"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 1
    assert "missing.gguf" in result.stderr
    assert "llm" in result.stderr
    assert "The mesh is ready" not in result.stdout
