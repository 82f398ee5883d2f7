"""A stopping front door lets running streams end and takes no new connections; a crashed one says so."""

import os
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def backstage(open_backstage, tmp_path_factory):
    """What is behind one front door after the other: their end is what the scenarios are about."""
    with open_backstage(tmp_path_factory.mktemp("drain")) as running:
        yield running


def refuses_connections(door):
    try:
        httpx.get(f"{door.public_url}/healthz", timeout=1)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False
    return False


def envoys_of(door):
    return {child.pid for child in psutil.Process(door.wrapper.pid).children() if child.name() == "envoy"}


def envoy_of(door):
    return next(child for child in psutil.Process(door.wrapper.pid).children() if child.name() == "envoy")


def shared_memory_of(door):
    number = (door.state_dir / "envoy" / "base-id").read_text()
    return Path(f"/dev/shm/envoy_shared_memory_{number}0")  # noqa: S108 - where Envoy puts it


def test_sigterm_lets_a_stream_end_while_new_connections_are_refused(open_envoy, backstage, wait_until):
    with open_envoy(backstage) as door, httpx.stream("GET", f"{door.public_url}/stream", timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "data: first"
        door.wrapper.send_signal(signal.SIGTERM)
        wait_until(lambda: not door.is_healthy(), "the door reports that it drains")
        wait_until(lambda: refuses_connections(door), "the port closes")
        assert door.wrapper.poll() is None
        httpx.get(f"{door.facade_url}/end-streams")
        assert [line for line in lines if line] == ["data: [DONE]"]
        memory = shared_memory_of(door)
        assert memory.exists()
        assert door.wrapper.wait(20) == 0
        assert not memory.exists()


def test_a_second_sigterm_ends_the_waiting(open_envoy, backstage, wait_until):
    with open_envoy(backstage) as door, httpx.stream("GET", f"{door.public_url}/stream", timeout=30) as stream:
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


def generation(door):
    try:
        answer = httpx.get(f"{door.admin_url}/server_info", timeout=5)
        return answer.json()["command_line_options"]["restart_epoch"]
    except httpx.HTTPError:
        return None


def test_sighup_puts_another_envoy_in_its_place_without_closing_the_ports(open_envoy, backstage, wait_until):
    with open_envoy(backstage) as door, httpx.stream("GET", f"{door.public_url}/stream", timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "data: first"
        old = envoy_of(door)
        door.wrapper.send_signal(signal.SIGHUP)
        statuses = set()

        def taken_over():
            statuses.add(httpx.get(f"{door.public_url}/v1/models", timeout=30).status_code)
            return generation(door) == 1

        wait_until(taken_over, "another Envoy answers")
        statuses |= {httpx.get(f"{door.public_url}/v1/models", timeout=30).status_code for _ in range(10)}
        assert statuses == {200}
        httpx.get(f"{door.facade_url}/end-streams")
        assert [line for line in lines if line] == ["data: [DONE]"]
        wait_until(lambda: not old.is_running() or old.status() == psutil.STATUS_ZOMBIE, "the old one is gone")
        assert door.is_healthy()
        door.wrapper.send_signal(signal.SIGTERM)
        assert door.wrapper.wait(40) == 0


def test_a_configuration_that_is_no_good_leaves_the_old_envoy_in_place(open_envoy, backstage, wait_until):
    with open_envoy(backstage) as door:
        old = envoy_of(door)
        configuration = door.state_dir / "envoy" / "envoy.yaml"
        good = configuration.read_text()
        configuration.write_text(good.replace("listeners:", "listenners:"))
        try:
            door.wrapper.send_signal(signal.SIGHUP)
            wait_until(lambda: envoys_of(door) - {old.pid}, "another Envoy looks at it")
            wait_until(lambda: envoys_of(door) == {old.pid}, "and refuses it")
            assert door.is_healthy()
            assert generation(door) == 0
        finally:
            configuration.write_text(good)
        door.wrapper.send_signal(signal.SIGHUP)
        wait_until(lambda: generation(door) == 1, "the next one does it")
        assert door.is_healthy()


def test_a_crashed_envoy_ends_its_wrapper_with_a_failure(open_envoy, backstage):
    with open_envoy(backstage) as door:
        memory = shared_memory_of(door)
        os.kill(envoy_of(door).pid, signal.SIGKILL)
        assert door.wrapper.wait(60) not in {0, None}
        assert not memory.exists()


def test_envoy_does_not_outlive_a_killed_wrapper_and_the_next_start_cleans_up(open_envoy, backstage, wait_until):
    with open_envoy(backstage) as door:
        envoy, left = envoy_of(door), shared_memory_of(door)
        door.wrapper.kill()
        wait_until(lambda: not envoy.is_running() or envoy.status() == psutil.STATUS_ZOMBIE, "Envoy is gone")
        assert left.exists()
    with open_envoy(backstage) as door:
        assert not left.exists()
        assert shared_memory_of(door) != left


def test_the_wrapper_refuses_to_start_without_tokens(tmp_path):
    (tmp_path / "envoy").mkdir()
    (tmp_path / "envoy" / "edge.env").write_text("ADMIN_PORT=1\nDRAIN_NOTICE_S=1\nDRAIN_LIMIT_S=1\nWORKERS=0\n")
    environ = {**os.environ, "OMNISERVE_STATE_DIR": str(tmp_path)}
    result = subprocess.run(
        ["bash", "envoy/run.sh"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert "tokens/envoy-public" in result.stderr
