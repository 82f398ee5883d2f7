# ruff: noqa: PT012 - what is tested is how the block itself ends
import asyncio

import pytest

from services.kit.owner import OwnedTaskCrashed, Owner


async def forever(log: list[str] | None = None) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if log is not None:
            log.append("cleaned up")


async def crash(after: asyncio.Event | None = None) -> None:
    if after is not None:
        await after.wait()
    raise RuntimeError("out of paper")


async def test_leaving_the_block_cancels_what_still_runs_and_waits_for_it():
    log: list[str] = []
    async with Owner() as owner:
        task = owner.start(forever(log), name="loop")
        await asyncio.sleep(0)
    assert task.cancelled()
    assert log == ["cleaned up"]


async def test_a_crash_cancels_the_block_and_the_other_tasks_and_names_the_task():
    log: list[str] = []
    with pytest.raises(OwnedTaskCrashed, match="printer") as caught:
        async with Owner() as owner:
            owner.start(forever(log), name="loop")
            owner.start(crash(), name="printer")
            await asyncio.Event().wait()
    assert caught.value.task == "printer"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert log == ["cleaned up"]


async def test_a_crash_is_reported_even_when_the_block_has_nothing_left_to_wait_for():
    with pytest.raises(OwnedTaskCrashed):
        async with Owner() as owner:
            owner.start(crash(), name="printer")
            await asyncio.sleep(0)


async def test_a_crash_while_the_block_is_being_left_is_reported():
    async def dies_of_cancellation() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("cleaning up failed")

    with pytest.raises(OwnedTaskCrashed, match="messy"):
        async with Owner() as owner:
            owner.start(dies_of_cancellation(), name="messy")
            await asyncio.sleep(0)


async def test_a_task_that_returns_or_is_cancelled_has_not_crashed():
    async with Owner() as owner:
        done = owner.start(asyncio.sleep(0, "result"), name="short")
        loop = owner.start(forever(), name="loop")
        assert await done == "result"
        loop.cancel()
        await asyncio.sleep(0)
        assert owner.crash is None


async def test_the_blocks_own_exception_comes_out_as_it_is():
    with pytest.raises(KeyError):
        async with Owner() as owner:
            owner.start(forever(), name="loop")
            raise KeyError("x")


async def test_cancelling_the_block_from_outside_cancels_the_tasks_and_is_no_crash():
    log: list[str] = []

    async def process() -> None:
        async with Owner() as owner:
            owner.start(forever(log), name="loop")
            await asyncio.Event().wait()

    task = asyncio.ensure_future(process())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cleaned up"]


async def test_the_first_crash_can_be_waited_for():
    go = asyncio.Event()

    async def observe(owner: Owner) -> OwnedTaskCrashed:
        return await owner.wait_crashed()

    with pytest.raises(OwnedTaskCrashed):
        async with Owner() as owner:
            observer = asyncio.ensure_future(observe(owner))
            owner.start(crash(go), name="printer")
            go.set()
            await asyncio.Event().wait()
    assert (await observer).task == "printer"


async def test_outside_its_block_an_owner_starts_nothing():
    owner = Owner()
    with pytest.raises(RuntimeError, match="loop"):
        owner.start(forever(), name="loop")
    async with owner:
        pass
    with pytest.raises(RuntimeError, match="loop"):
        owner.start(forever(), name="loop")
