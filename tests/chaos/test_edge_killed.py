"""kill -9 of admission, relay, Envoy and the workers under load: no permit is left, nothing runs twice, no answer is spliced."""

import asyncio
import os
from collections import Counter

import pytest

from tests.fixtures.amounts import amount
from tests.fixtures.load import Chats, Load
from tests.fixtures.proxied import proxied_mesh

SLOTS = 4
RESTARTS = int(os.environ.get("OMNISERVE_CHAOS_RESTARTS", "1"))
ROUNDS = {
    "admission": amount(2, thorough=4),
    "relay": amount(1, thorough=2),
    "envoy": amount(1, thorough=2),
    "workers": amount(2, thorough=4),
}


@pytest.fixture(scope="module")
def proxied(tmp_path_factory, make_mesh, free_ports, wait_until):
    upstreams = {"OMNISERVE_TTS_UPSTREAM": "tts"}
    folder = tmp_path_factory.mktemp("killed")
    # A start and a drain take as long as the machine makes them; who asks meanwhile is held, and what runs may end.
    patience = {
        "OMNISERVE_EDGE_HOLD_S": "110",
        "OMNISERVE_FACADE_PEER_WAIT_S": "110",
        "OMNISERVE_LLM_LOAD_WAIT_S": "110",
        "OMNISERVE_DRAIN_GRACE_S": "30",
    }
    settings = {"OMNISERVE_SLOTS": str(SLOTS), **patience}
    with proxied_mesh(folder, make_mesh, free_ports, wait_until, upstreams, **settings) as running:
        yield running


async def kill(proxied, part):
    if part == "workers":
        proxied.workers.stop()
        await asyncio.to_thread(proxied.workers.start)
        return
    old = await asyncio.to_thread(proxied.mesh.kill, part)
    await asyncio.to_thread(proxied.mesh.wait_replaced, part, old)


@pytest.mark.parametrize("part", ROUNDS)
async def test_a_part_that_is_killed_under_load_leaves_nothing_wrong_behind(proxied, part):
    async with Load(proxied.mesh.public_url, clients=8, seed=len(part)) as load:
        for _ in range(ROUNDS[part]):
            await load.served(30)
            await kill(proxied, part)
        await load.served(30)
    tally = load.tally
    assert tally.faults == []
    assert await asyncio.to_thread(lambda: proxied.wait_idle() or proxied.left()) == (0, 0, 0)
    tried = Counter(each.mark for each in proxied.workers.seen())
    assert [mark for mark in tally.outcomes if tried[mark] > 1] == []
    assert [mark for mark, outcome in tally.outcomes.items() if outcome == "served" and tried[mark] != 1] == []
    assert proxied.workers.most_at_once() <= SLOTS
    if part == "relay":
        assert tally.count().keys() == {"served"}, "relay is in nobody's way"
    if part == "admission":
        assert tally.count()["broken"] == 0, "what runs goes on without admission"


@pytest.mark.parametrize("part", ["admission", "relay", "facade", "llm", "jobs", "vram"])
async def test_a_part_that_is_restarted_loses_no_request(proxied, part):
    async with (
        # Not as background: while chats go on without a pause, the device is never idle, and that is what background waits for.
        Load(proxied.mesh.public_url, clients=6, seed=len(part), tiers=("paid", "sub", "free")) as load,
        Chats(proxied.mesh.public_url) as chats,
    ):
        for _ in range(RESTARTS):
            await asyncio.gather(load.served(20), chats.served(4))
            await asyncio.to_thread(proxied.mesh.restart, part)
        await asyncio.gather(load.served(20), chats.served(4))
    assert load.tally.faults == []
    assert load.tally.count().keys() == {"served"}
    assert chats.failures == []
    tried = Counter(each.mark for each in proxied.workers.seen())
    assert [mark for mark in load.tally.outcomes if tried[mark] != 1] == []
    await asyncio.to_thread(proxied.wait_idle)


async def test_a_front_door_that_is_replaced_loses_no_request(proxied):
    async with Load(proxied.mesh.public_url, clients=8, seed=5) as load:
        await load.served(30)
        before = proxied.mesh.pid("envoy")
        await asyncio.to_thread(proxied.mesh.restart, "envoy")
        await asyncio.to_thread(proxied.mesh.wait_replaced, "envoy", before)
        await load.served(60)
    assert load.tally.faults == []
    assert load.tally.count().keys() <= {"served", "broken"}
    # "broken" is a connection that Envoy closes for idleness just when a request is sent on it: that one has reached nobody.
    tried = Counter(each.mark for each in proxied.workers.seen())
    assert [mark for mark, outcome in load.tally.outcomes.items() if tried[mark] != (outcome == "served")] == []
    await asyncio.to_thread(proxied.wait_idle)
