"""A driver that fails, hangs or lies costs a denial, and no more."""

import asyncio
import threading

import pytest

from services.kit.clock import ManualClock
from services.vram.adapters.driver import Driver, DriverError, Sight
from services.vram.adapters.host_memory import HostMemory
from services.vram.core.model import Facts, Failure, Kind, Reading

GPU0, GPU1 = Facts("gpu0", "a", Kind.GPU), Facts("gpu1", "b", Kind.GPU)


class Scripted:
    """A source that gives what it is told to, in turn; the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    def read(self, pids):
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer


def sight(free=500, total=1000, used=None, facts=GPU0):
    return {facts.device: Sight(facts, total, free, used)}


def guarded(source, clock=None, limit_s=60.0):
    return Driver(source, clock or ManualClock(), [GPU0], limit_s=limit_s)


async def test_what_the_driver_says_carries_the_mark_and_the_time_from_before_it_was_asked():
    clock = ManualClock()
    asked_at = clock.monotonic()

    def answer():
        clock.advance(5)
        return sight(used={7: 3})

    found = await guarded(Scripted(answer), clock).read(4, ())
    assert found == {"gpu0": Reading(4, asked_at, 1000, 500, {7: 3})}


@pytest.mark.parametrize(
    ("nonsense", "words"),
    [
        (sight(free=1001), "1001 MiB free of 1000"),
        (sight(free=-1), "-1 MiB free"),
        (sight(total=0, free=0), "a device of 0 MiB"),
        (sight(used={1: -5}), "less than nothing"),
        ({}, "does not tell about this device"),
        (ValueError("boom"), "ValueError: boom"),
        (DriverError("gone"), "gone"),
        ({"gpu0": DriverError("lost")}, "lost"),
    ],
)
async def test_failures_and_nonsense_are_unknown(nonsense, words):
    found = (await guarded(Scripted(nonsense)).read(0, ()))["gpu0"]
    assert isinstance(found, Failure)
    assert words in found.message


async def test_it_is_asked_again_after_pauses_that_grow_and_end_with_the_first_answer():
    clock, source = ManualClock(), Scripted(DriverError("x"))
    driver = guarded(source, clock)
    pauses = []
    for _ in range(9):
        found = (await driver.read(0, ()))["gpu0"]
        pauses.append(found.retry_at - clock.monotonic())
        assert driver.rests()
        assert await driver.read(0, ()) == {}, "not asked during the pause"
        clock.advance(pauses[-1])
        assert not driver.rests()
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert source.asked == 9
    source.answers = [sight(), DriverError("x")]
    assert isinstance((await driver.read(0, ()))["gpu0"], Reading)
    assert (await driver.read(0, ()))["gpu0"].retry_at - clock.monotonic() == 0.5


async def test_a_device_that_fails_takes_no_other_with_it():
    driver = guarded(Scripted(sight() | sight(facts=GPU1), {"gpu0": DriverError("lost")} | sight(facts=GPU1)))
    assert set(await driver.read(0, ())) == {"gpu0", "gpu1"}
    found = await driver.read(1, ())
    assert isinstance(found["gpu0"], Failure)
    assert isinstance(found["gpu1"], Reading)
    assert not driver.rests()


async def test_a_driver_that_hangs_is_unknown_until_it_answers_and_never_asked_twice_at_once():
    clock, gate = ManualClock(), threading.Event()

    def hang():
        gate.wait(60)
        return sight(free=1)

    source = Scripted(hang, sight(free=2))
    driver = guarded(source, clock, limit_s=0.05)
    assert "did not answer within 0.05 s" in (await driver.read(0, ()))["gpu0"].message
    clock.advance(1)
    assert "still unanswered" in (await driver.read(0, ()))["gpu0"].message
    assert source.asked == 1
    gate.set()
    found = None
    async with asyncio.timeout(30):
        while not isinstance(found, Reading):
            clock.advance(30)
            found = (await driver.read(0, ())).get("gpu0")
            await asyncio.sleep(0.01)
    assert found.free_mib == 2, "what came too late is not believed"
    driver.close()


def machine(tmp_path, files=None, *, total=8_000_000, available=4_000_000, groups="0::/box/me\n"):
    given = {
        "proc/meminfo": f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n",
        "proc/self/cgroup": groups,
        **(files or {}),
    }
    for name, text in given.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemory(tmp_path)


def seen(host, pids=()):
    found = host.read(pids)["cpu"]
    return found.total_mib, found.free_mib, found.used_mib


def test_the_hosts_memory_is_what_the_kernel_calls_available(tmp_path):
    assert seen(machine(tmp_path, total=8192, available=4096)) == (8, 4, {})


def test_a_control_group_above_this_one_limits_it_too_and_pages_it_can_drop_are_free(tmp_path):
    gib = 2**30
    host = machine(
        tmp_path,
        {
            "sys/fs/cgroup/box/me/memory.max": "max\n",
            "sys/fs/cgroup/box/memory.max": f"{2 * gib}\n",
            "sys/fs/cgroup/box/memory.current": f"{gib + gib // 2}\n",
            "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {gib // 4}\n",
        },
    )
    assert seen(host) == (2048, 768, {})


def test_the_older_kind_of_control_group_counts_as_well(tmp_path):
    host = machine(
        tmp_path,
        {
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2**30}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{2**29}\n",
            "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 0\n",
        },
        groups="5:cpu,memory:/box\n3:pids:/x\n",
    )
    assert seen(host) == (1024, 512, {})


def test_pages_of_files_are_no_memory_that_a_process_holds(tmp_path):
    status = "Name: x\nRssAnon: 204800 kB\nRssFile: 999999 kB\nRssShmem: 102400 kB\n"
    assert seen(machine(tmp_path, {"proc/77/status": status}), (77, 78))[2] == {77: 300}


def test_a_host_that_does_not_tell_is_a_driver_that_fails(tmp_path):
    with pytest.raises(DriverError, match="meminfo"):
        HostMemory(tmp_path).read(())


def test_this_host_tells(tmp_path):
    total, free, _ = seen(HostMemory(), (1,))
    assert 0 < free <= total
