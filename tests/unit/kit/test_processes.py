import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.kit.processes import is_dead, own_identity

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not own_identity(), reason="this system gives processes no identity")


def child() -> "subprocess.Popen[str]":
    code = "from services.kit.processes import own_identity; print(own_identity(), flush=True); input()"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_process_is_alive_until_it_is_killed_even_before_anybody_reaps_it():
    process = child()
    assert process.stdout is not None
    identity = process.stdout.readline().strip()
    assert identity != own_identity()
    assert not is_dead(identity)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(identity)
    process.wait()
    assert is_dead(identity)


def test_a_successor_with_the_same_number_is_another_process():
    world, pid, start = own_identity().split(".")
    assert is_dead(f"{world}.{pid}.{int(start) + 1}")


@pytest.mark.parametrize("identity", ["", "llm", "0123456789abcdef.1.1", "x.y.z"])
def test_who_cannot_be_seen_from_here_is_not_called_dead(identity):
    assert not is_dead(identity)
