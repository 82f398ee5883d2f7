"""A stopping front door lets running streams end and takes no new connections; a crashed one says so."""

import os
import signal
import subprocess

import httpx
import psutil
import pytest

pytestmark = pytest.mark.e2e


def refuses_connections(door):
    try:
        httpx.get(f"{door.public_url}/healthz", timeout=1)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False
    return False


def envoy_of(door):
    return next(child for child in psutil.Process(door.wrapper.pid).children() if child.name() == "envoy")


def test_sigterm_lets_a_stream_end_while_new_connections_are_refused(open_door, tmp_path, wait_until):
    with open_door(tmp_path) as door, httpx.stream("GET", f"{door.public_url}/stream", timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "data: first"
        door.wrapper.send_signal(signal.SIGTERM)
        wait_until(lambda: not door.is_healthy(), "the door reports that it drains")
        wait_until(lambda: refuses_connections(door), "the port closes")
        assert door.wrapper.poll() is None
        httpx.get(f"{door.facade_url}/end-streams")
        assert [line for line in lines if line] == ["data: [DONE]"]
        assert door.wrapper.wait(20) == 0


def test_a_second_sigterm_ends_the_waiting(open_door, tmp_path, wait_until):
    with open_door(tmp_path) as door, httpx.stream("GET", f"{door.public_url}/stream", timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "data: first"
        door.wrapper.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(door), "the port closes")
        door.wrapper.send_signal(signal.SIGTERM)
        assert door.wrapper.wait(20) == 0
        with pytest.raises(httpx.HTTPError):
            list(lines)


def test_a_stream_that_never_ends_is_cut_at_the_limit(open_door, tmp_path):
    with (
        open_door(tmp_path, OMNISERVE_EDGE_DRAIN_LIMIT_S="1") as door,
        httpx.stream("GET", f"{door.public_url}/stream", timeout=30) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == "data: first"
        door.wrapper.send_signal(signal.SIGTERM)
        assert door.wrapper.wait(30) == 0


def test_a_crashed_envoy_ends_its_wrapper_with_a_failure(open_door, tmp_path):
    with open_door(tmp_path) as door:
        os.kill(envoy_of(door).pid, signal.SIGKILL)
        assert door.wrapper.wait(20) not in {0, None}


def test_envoy_does_not_outlive_a_killed_wrapper(open_door, tmp_path, wait_until):
    with open_door(tmp_path) as door:
        envoy = envoy_of(door)
        door.wrapper.kill()
        wait_until(lambda: not envoy.is_running() or envoy.status() == psutil.STATUS_ZOMBIE, "Envoy is gone")


def test_the_wrapper_refuses_to_start_without_tokens(tmp_path):
    (tmp_path / "envoy").mkdir()
    (tmp_path / "envoy" / "edge.env").write_text("ADMIN_PORT=1\nDRAIN_NOTICE_S=1\nDRAIN_LIMIT_S=1\nWORKERS=0\n")
    environ = {**os.environ, "OMNISERVE_STATE_DIR": str(tmp_path)}
    result = subprocess.run(
        ["bash", "envoy/run.sh"], env=environ, capture_output=True, text=True, timeout=10, check=False
    )
    assert result.returncode == 2
    assert "tokens/envoy-public" in result.stderr
