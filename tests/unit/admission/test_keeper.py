"""The owner of the desk with a clock that is set by hand."""

import asyncio

import pytest

from services.admission.adapters.memory_file import MemoryFile
from services.admission.core.desk import Desk, Memory
from services.admission.core.model import Ask, Granted, Modality, PoolSpec, Queued, Rules, Tier
from services.admission.core.scheduler import Scheduler
from services.admission.keeper import Keeper
from services.kit.clock import ManualClock

NOTHING = Memory((), ())
ASK = Ask("gpu0", Modality.LLM, Tier.FREE, 1, 100.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(tmp_path, clock):
    def keeper(is_dead=lambda _: False, past=NOTHING, **rules: object) -> Keeper:
        scheduler = Scheduler([PoolSpec("gpu0", 1)], Rules(**rules))
        desk = Desk(scheduler, epoch=1, past=past, grace_s=5.0, settle_s=3.0, now=clock.monotonic())
        return Keeper(desk, clock, MemoryFile(tmp_path / "admission.json", ahead_s=0.0), is_dead)

    return keeper


async def next_event(inbox):
    _, event = await asyncio.wait_for(inbox.events.get(), 10)
    return event


async def test_events_go_to_whom_they_concern(make):
    keeper = make()
    first, inbox = keeper.ask(ASK)
    _, other = keeper.ask(ASK)
    assert isinstance(await next_event(inbox), Granted)
    assert other.events.empty()
    keeper.leave(first)
    assert isinstance(await next_event(other), Granted)


async def test_who_waits_for_more_than_a_moment_hears_of_its_place(make, clock):
    keeper = make()
    keeper.ask(ASK)
    _, inbox = keeper.ask(ASK)
    running = asyncio.ensure_future(keeper.run())
    await asyncio.sleep(0)
    clock.advance(0.5)
    assert await next_event(inbox) == Queued(2, 1, None)
    running.cancel()


async def test_a_failure_in_a_turn_ends_the_keeper_instead_of_going_on_wrong(make):
    keeper = make()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    running = asyncio.ensure_future(keeper.run())
    await asyncio.sleep(0)
    keeper.desk.scheduler.ask = fail
    with pytest.raises(ZeroDivisionError):
        keeper.ask(ASK)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, 10)


async def test_a_dead_session_is_buried_before_its_grace_is_over(make, clock):
    dead: set[str] = set()
    keeper = make(is_dead=dead.__contains__)
    keeper.open_session("s", "llm", [])
    keeper.session_ask("s", 1, ASK)
    keeper.lose_session("s")
    _, inbox = keeper.ask(ASK)
    assert inbox.events.empty()
    dead.add("s")
    running = asyncio.ensure_future(keeper.run())
    assert isinstance(await next_event(inbox), Granted)
    running.cancel()


async def test_a_session_of_the_past_that_is_dead_holds_nobody_up(make):
    keeper = make(is_dead=lambda session_id: session_id == "old", past=Memory((("old", "llm"),), ()))
    _, inbox = keeper.ask(ASK)
    assert inbox.events.empty()
    running = asyncio.ensure_future(keeper.run())
    assert isinstance(await next_event(inbox), Granted)
    running.cancel()


async def test_a_memory_that_cannot_be_written_stops_nobody(make, tmp_path):
    keeper = make()
    (tmp_path / "admission.json").mkdir()
    keeper.open_session("s", "llm", [])
    keeper.session_ask("s", 1, ASK)
    assert keeper.desk.scheduler.is_holding(2) or keeper.desk.scheduler.is_holding(1)
