"""`omniserve lease` as a user runs it: the command's own status, signals, a denial, a lease that is lost."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from omniserve.vram.v1 import vram_pb2 as pb
from tests.fixtures.memory import running_broker

ROOT = Path(__file__).parents[2]
LIMIT_S = 100


@pytest.fixture
async def broker(tmp_path):
    async with running_broker(tmp_path, check_tokens=False) as running:
        yield running


async def start(broker, *arguments, **pipes):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNISERVE_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cli.main",
        "lease",
        "--url",
        f"http://127.0.0.1:{broker.port}",
        *arguments,
        env=environ,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        **pipes,
    )


async def run(broker, *arguments):
    process = await start(broker, *arguments)
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def leases(broker, count):
    """Wait until there are so many leases; return them."""
    async with asyncio.timeout(LIMIT_S):
        while len(broker.broker.ledger.leases) != count:
            await asyncio.sleep(0.01)
    return list(broker.broker.ledger.leases.values())


def python(code):
    return ("--", sys.executable, "-c", code)


async def test_the_command_runs_under_a_lease_with_its_own_output_and_status(broker):
    status, out, err = await run(broker, "--mib", "600", *python("import sys; print('hello'); sys.exit(7)"))
    assert (status, out) == (7, "hello\n")
    assert "600 MiB leased on gpu0" in err
    assert broker.broker.ledger.counts.granted == 1
    assert not broker.broker.ledger.leases


async def test_the_broker_knows_who_runs_and_for_what(broker):
    arguments = ("--mib", "5", "--tier", "background", "--for", "a test", "--tenant", "me", "--ttl", "30")
    process = await start(broker, *arguments, *python("input()"))
    async with asyncio.timeout(LIMIT_S):
        _, err = await process.communicate()
    assert process.returncode == 1, "input() without anything to read"
    assert b"EOFError" in err
    process = await start(broker, *arguments, *python("import time; time.sleep(1000)"))
    (lease,) = await leases(broker, 1)
    assert (lease.tenant, lease.purpose, lease.tier.name, lease.ttl_s) == ("me", "a test", "BACKGROUND", 30)
    async with asyncio.timeout(LIMIT_S):
        while not broker.broker.ledger.get(lease.lease_id).pid:
            await asyncio.sleep(0.01)
    process.terminate()
    await process.communicate()
    assert not broker.broker.ledger.leases


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signals_reach_the_command_and_its_end_by_one_is_told_as_shells_do(broker, number):
    process = await start(broker, "--mib", "5", *python("import time; print('ready', flush=True); time.sleep(1000)"))
    async with asyncio.timeout(LIMIT_S):
        assert await process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        await process.communicate()
    assert process.returncode == 128 + number
    assert not broker.broker.ledger.leases


async def test_a_command_that_catches_the_signal_ends_as_it_likes(broker):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); "
        "print('ready', flush=True); time.sleep(1000)"
    )
    process = await start(broker, "--mib", "5", *python(code))
    async with asyncio.timeout(LIMIT_S):
        assert await process.stdout.readline() == b"ready\n"
        process.terminate()
        await process.communicate()
    assert process.returncode == 9


async def test_without_room_nothing_is_run(broker):
    status, out, err = await run(broker, "--mib", "20000", *python("print('ran')"))
    assert (status, out) == (75, "")
    assert "no room" in err
    assert "20000 MiB" in err
    status, out, err = await run(broker, "--mib", "20000", "--min-mib", "500", *python("print('ran')"))
    assert (status, out) == (0, "ran\n")
    assert "10000 MiB leased" in err


async def test_a_lost_lease_is_told_and_the_command_goes_on(broker):
    code = "import time; print('ready', flush=True); time.sleep(1000)"
    process = await start(broker, "--mib", "6000", "--ttl", "3", *python(code))
    async with asyncio.timeout(LIMIT_S):
        assert await process.stdout.readline() == b"ready\n"
        (lease,) = await leases(broker, 1)
        await broker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
        await broker.lease(9000, "other")
        said = b""
        while b"LOST" not in said:
            said += await process.stderr.readline()
        assert process.returncode is None
        process.terminate()
        await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


async def test_the_room_of_a_killed_tenant_is_back_after_its_ttl_not_before_and_at_the_first_call(broker):
    process = await start(broker, "--mib", "6000", "--ttl", "60", *python("import time; time.sleep(1000)"))
    (lease,) = await leases(broker, 1)
    async with asyncio.timeout(LIMIT_S):
        while not broker.broker.ledger.get(lease.lease_id).pid:
            await asyncio.sleep(0.01)
        process.kill()
        os.kill(broker.broker.ledger.get(lease.lease_id).pid, signal.SIGKILL)
        await process.communicate()
    broker.clock.advance(59.5)
    assert not (await broker.lease(5000, "other")).granted
    broker.clock.advance(0.5)
    assert (await broker.lease(5000, "other")).granted


async def test_what_cannot_be_started_is_told_as_shells_do(broker):
    assert (await run(broker, "--mib", "5", "--", "no-such-command-here"))[0] == 127
    assert (await run(broker, "--mib", "5", "--", str(ROOT)))[0] == 126
    assert not broker.broker.ledger.leases


async def test_what_is_wrong_with_the_ask_is_said_in_a_line(broker):
    status, _, err = await run(broker, "--mib", "5", "--device", "gpu9", *python("1"))
    assert (status, len(err.splitlines())) == (1, 1)
    assert "no device 'gpu9'" in err
    status, _, err = await run(broker, "--mib", "5", "--ttl", "999999", *python("1"))
    assert status == 2
    assert "ttl_s" in err
