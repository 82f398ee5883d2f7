"""kill -9 of admission with streams behind the gate: they go on, no slot is given twice, no permit is left."""

import asyncio
import os
import random
import signal

import pytest

from tests.fixtures.gated import Gated, gated
from tests.fixtures.workers import new_mark

pytestmark = pytest.mark.alone

SLOTS = 4
KILLS = int(os.environ.get("OMNISERVE_CHAOS_KILLS", "4"))
CALLERS = 12


async def caller(gate: Gated, chance: random.Random, ended: asyncio.Event) -> int:
    """Ask until told to stop: streams, short answers, and now and then leave early; return how many streams came whole."""
    whole = 0
    while not ended.is_set():
        if chance.random() < 0.3:
            try:
                async with asyncio.timeout(chance.uniform(0.01, 0.5)):
                    await gate.ask("/", "slow?ms=200")
            except TimeoutError:
                pass
            continue
        answer = await gate.ask("/", f"sse?chunks=10&delay_ms={chance.randrange(5, 60)}")
        if answer.status_code == 200:
            assert answer.text.endswith("data: [DONE]\n\n"), "a stream was cut"
            whole += 1
        else:
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.1)
    return whole


async def test_killing_admission_under_load_cuts_no_stream_and_gives_no_slot_twice(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS=str(SLOTS)) as gate:
        chance = random.Random(20261130)
        ended = asyncio.Event()
        callers = [asyncio.ensure_future(caller(gate, random.Random(n), ended)) for n in range(CALLERS)]
        for _ in range(KILLS):
            await asyncio.sleep(chance.uniform(0.5, 2.0))
            await gate.until(lambda: len(gate.workers.running("llm")) >= 2, "streams run")
            await asyncio.to_thread(gate.end, "admission")
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            gate.start("admission")
            await asyncio.to_thread(gate.wait_ready)
        ended.set()
        assert sum(await asyncio.gather(*callers)) > KILLS
        assert gate.workers.most_at_once("llm") <= SLOTS
        await gate.wait_idle()


async def test_an_admission_that_hangs_is_a_503_and_what_runs_keeps_its_slot(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS="1") as gate:
        mark, answer = await gate.running()
        gate.processes["admission"].send_signal(signal.SIGSTOP)
        refused = await gate.ask("/", "json")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "admission_unavailable")
        gate.processes["admission"].send_signal(signal.SIGCONT)
        waiter = gate.start_ask("/", "json", mark=(waiting := new_mark()))
        await gate.wait_for(in_use=1, waiting=1)
        await asyncio.sleep(1)  # several readings of the gauges
        assert gate.workers.seen(mark=waiting) == []
        gate.workers.release(mark)
        assert (await answer).status_code == (await waiter).status_code == 200
        await gate.wait_idle()


async def test_killing_envoy_gives_every_permit_back(tmp_path, free_ports, wait_until):
    with gated(tmp_path / "s", free_ports, wait_until, SLOTS=str(SLOTS)) as gate:
        answers = [(await gate.running())[1] for _ in range(SLOTS)]
        answers += [gate.start_ask("/", "json") for _ in range(20)]
        await gate.wait_for(in_use=SLOTS, waiting=20)
        await asyncio.to_thread(gate.end, "envoy")
        await gate.wait_idle()
        await asyncio.gather(*answers, return_exceptions=True)
        gate.start("envoy")
        await asyncio.to_thread(gate.wait_ready)
        assert (await gate.ask("/", "json")).status_code == 200
