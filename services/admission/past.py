"""Exchanges that go on without a call of their own: of before a restart, and of a connection that broke.

Envoy's gauges tell when they are over; until then their slots stay taken.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

from services.admission.adapters.gauges import GaugesError
from services.admission.core.remains import OwnSide, Running, choose_side, past
from services.admission.gate import Gate
from services.admission.keeper import Keeper
from services.kit import telemetry
from services.kit.wire.callouts import Callouts

AGAIN_S: Final = 0.1
"""How soon gauges that cannot be read are tried again, while nothing is granted before they are."""
LATER_S: Final = 1.0
"""How soon when the wait for them is over."""
PATIENCE: Final = 5
"""So many readings may fail one after another before Envoy counts as gone."""
COUNTED_EVERY_S: Final = 0.2
"""How often it is looked what of the past is over."""

_log = telemetry.logger(__name__)


class LetIn(Protocol):
    """An exchange that was let in."""

    upstream: str


async def count_the_past(
    keeper: Keeper, read: Callable[[], Running], let_in: Callable[[], AbstractSet[LetIn]] = frozenset
) -> None:
    """Hold slots for exchanges of before the restart until the last of them is over; `read` blocks or raises GaugesError.

    `let_in` tells the exchanges that were let in since and run.
    """
    desk = keeper.desk
    if not desk.is_uncounted:
        return
    running = await _first(keeper, read)
    # Once something was let in, the side is chosen, and what it had before cannot be told apart any more.
    is_fresh = desk.is_uncounted
    if is_fresh:
        keeper.side = choose_side(desk.epoch, running)
    own = OwnSide(running.at(keeper.side) if is_fresh else {})
    _log.info("exchanges from before the restart", e0=dict(running.e0), e1=dict(running.e1), side=keeper.side)
    while True:
        found = past(running, keeper.side, own.left)
        keeper.count_past(found)
        if not found:
            return
        await asyncio.sleep(COUNTED_EVERY_S)
        before = let_in()
        try:
            running = await asyncio.to_thread(read)
            own.read(running.at(keeper.side), Counter(each.upstream for each in before & let_in()))
        except GaugesError as error:
            # Either Envoy is gone, and every exchange with it, or it comes back and tells: the slots wait.
            _log.warning("exchanges from before the restart stay counted", error=str(error))
            await asyncio.sleep(LATER_S)


async def _first(keeper: Keeper, read: Callable[[], Running]) -> Running:
    told = False
    while True:
        try:
            return await asyncio.to_thread(read)
        except GaugesError as error:
            if not keeper.desk.is_uncounted and not told:
                told = True
                _log.warning("granting without knowing what still runs behind the gate", error=str(error))
        await asyncio.sleep(AGAIN_S if keeper.desk.is_uncounted else LATER_S)


async def watch_the_lost(gate: Gate, callouts: Callouts, read: Callable[[], Running]) -> None:
    """Give permits of lost connections back as soon as their exchanges are over; runs until cancelled.

    An Envoy that is gone has none left. One that cannot be asked for PATIENCE readings is taken for gone.
    """
    while True:
        await gate.lost.happened.wait()
        gate.lost.happened.clear()
        failures = 0
        while gate.lost.tickets:
            running: dict[str, int] = {}
            try:
                found = await asyncio.to_thread(read)
                failures = 0
                live = gate.live(callouts)
                running = {name: count - live[name] for name, count in found.at(gate.keeper.side).items()}
            except GaugesError as error:
                failures += 1
                if not error.is_gone and failures < PATIENCE:
                    await asyncio.sleep(LATER_S)
                    continue
                _log.warning("exchanges of a lost connection count as over", error=str(error))
            for ticket in gate.lost.over(running):
                gate.keeper.leave(ticket)
            await asyncio.sleep(COUNTED_EVERY_S)
