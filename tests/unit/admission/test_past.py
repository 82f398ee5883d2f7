"""After a restart Envoy's gauges are followed until nothing of the past is left."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.admission import past
from services.admission.adapters.gauges import GaugesError, parse, read
from services.admission.adapters.memory_file import MemoryFile
from services.admission.core.desk import SETTLING, Desk, Memory
from services.admission.core.model import Ask, Granted, Modality, PoolSpec, Rules, Tier
from services.admission.core.remains import READINGS, OwnSide, Running, Use, own_side
from services.admission.core.scheduler import Scheduler
from services.admission.gate import Lost
from services.admission.keeper import Keeper
from services.kit.clock import ManualClock

ASK = Ask("gpu0", Modality.LLM, Tier.FREE, 1, 100.0)
LLM = Use("llm", "gpu0", Modality.LLM, 1)
NOTHING = Running({}, {})


@pytest.fixture
def keeper(tmp_path, monkeypatch) -> Keeper:
    for name in ("AGAIN_S", "LATER_S", "COUNTED_EVERY_S"):
        monkeypatch.setattr(past, name, 0.0)
    clock = ManualClock()
    scheduler = Scheduler([PoolSpec("gpu0", 2)], Rules())
    desk = Desk(scheduler, epoch=2, past=Memory((), (), (LLM,)), grace_s=5, settle_s=3, now=clock.monotonic())
    return Keeper(desk, clock, MemoryFile(tmp_path / "admission.json", ahead_s=0.0), lambda _: False)


def in_use(keeper: Keeper) -> int:
    return keeper.desk.scheduler.pools["gpu0"].in_use


async def follow(keeper: Keeper, *answers: Running | Exception | Callable[[], Running]) -> list[int]:
    """Follow gauges that read so, one after the other; return the slots in use before each reading."""
    seen: list[int] = []
    left = list(answers)

    def reading() -> Running:
        seen.append(in_use(keeper))
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    async with asyncio.timeout(20):
        await past.count_the_past(keeper, reading)
    assert not left
    return seen


async def test_slots_follow_the_gauges_until_nothing_is_left(keeper):
    assert await follow(keeper, Running({}, {"llm": 2}), Running({}, {"llm": 1}), NOTHING) == [0, 2, 1]
    assert (in_use(keeper), keeper.side) == (0, "e0")


async def test_nothing_is_granted_while_the_gauges_cannot_be_read(keeper):
    heard = []
    keeper.attend(ASK, lambda _, event: heard.append(event))
    assert not heard
    await follow(keeper, GaugesError("refused"), GaugesError("refused"), NOTHING)
    assert isinstance(heard[-1], Granted)


async def test_slots_stay_taken_while_the_gauges_cannot_be_read_again(keeper):
    seen = await follow(keeper, Running({}, {"llm": 2}), GaugesError("gone"), NOTHING)
    assert seen == [0, 2, 2]


async def test_the_side_without_a_past_is_used(keeper):
    await follow(keeper, Running({"llm": 1}, {}), NOTHING)
    assert keeper.side == "e1"


async def test_gauges_that_come_late_count_the_other_side_only(keeper):
    keeper.desk.scheduler.holds[SETTLING] = replace(keeper.desk.scheduler.holds[SETTLING], until=keeper.now())

    def too_late() -> Running:
        keeper.desk.advance(keeper.now())
        raise GaugesError("not yet")

    assert await follow(keeper, too_late, Running({"llm": 5}, {"llm": 1}), NOTHING) == [0, 0, 1]
    assert keeper.side == "e0"


async def test_a_start_without_a_past_asks_nobody(tmp_path, keeper):
    keeper.desk.is_uncounted = False
    assert await follow(keeper) == []


def test_permits_of_a_lost_connection_are_over_as_their_exchanges_are():
    lost = Lost()
    for ticket in (1, 2, 3):
        lost.add("llm", ticket)
    lost.add("image", 4)
    assert lost.over({"llm": 5, "image": 1}) == []
    assert lost.over({"llm": 2, "image": 1}) == [3]
    assert sorted(lost.over({"llm": 1})) == [2, 4]
    assert lost.over({"llm": -1}) == [1]
    assert not lost.tickets


def test_active_and_pending_requests_of_an_upstream_are_added():
    names = {
        "cluster.llm.local.e0.upstream_rq_active": 2,
        "cluster.llm.local.e0.upstream_rq_pending_active": 1,
        "cluster.image_worker.local.e1.upstream_rq_active": 4,
        "cluster.llm.overflow.upstream_rq_active": 9,
    }
    stats = [{"name": name, "value": value} for name, value in names.items()]
    assert parse(json.dumps({"stats": [*stats, {"histograms": {}}]}).encode()) == Running(
        {"llm": 3}, {"image_worker": 4}
    )


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"stats": [{"name": "cluster.a.local.e0.upstream_rq_active"}]}'])
def test_what_is_no_list_of_gauges_is_refused(text: bytes):
    with pytest.raises(GaugesError):
        parse(text)


def test_an_edge_that_does_not_answer_is_told_so():
    with pytest.raises(GaugesError, match="does not tell"):
        read("127.0.0.1:1")


class Exchange:
    """One that was let in since."""

    upstream = "llm"


async def test_what_is_left_on_the_own_side_is_told_apart_from_what_is_new(keeper):
    """Both sides hold some of the past; new exchanges come and go, and the last old one ends among them."""
    new = [Exchange(), Exchange()]
    both = Running({"llm": 1}, {"llm": 1})
    readings = [
        both,
        *[Running({"llm": 1}, {"llm": 1 + len(new)}) for _ in range(3)],
        *[Running({}, {"llm": 1 + len(new)}) for _ in range(2)],
        *[Running({}, {"llm": len(new)}) for _ in range(READINGS)],
    ]
    if own_side(keeper.desk.epoch) == "e0":
        readings = [Running(each.e1, each.e0) for each in readings]
    seen = []
    left = list(readings)

    def reading() -> Running:
        seen.append(in_use(keeper))
        return left.pop(0)

    async with asyncio.timeout(20):
        await past.count_the_past(keeper, reading, lambda: frozenset(new))
    assert not left
    assert seen == [0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert in_use(keeper) == 0


def test_a_newcomer_that_envoy_does_not_count_yet_does_not_end_an_old_exchange():
    own = OwnSide({"llm": 1})
    for new in (0, 0, 1, 0, 0, 1, 0):
        own.read({"llm": 1}, {"llm": new})
    assert own.left == {"llm": 1}
    own.read({}, {})
    assert own.left == {"llm": 0}
