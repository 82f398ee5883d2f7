"""What a permit costs inside the scheduler: `python -m bench.admission.scheduler`.

Single-threaded, no I/O; times are the thread's own on the processor, since the machine is shared. The first number is of a
mix of asks with deadlines, one in eight cancelled, a quarter of a modality that is held half of the time, so that they are
passed over. The second is the cost of one release that hands over, by the length of the line; the ratio to the shortest line
shows whether it grows.
"""

import statistics
import time

from bench.measure import spread
from services.admission.core.model import Ask, Hold, Modality, PoolSpec, Rules, Tier
from services.admission.core.scheduler import Scheduler

ROUNDS = 5
PAIRS = 50_000
RELEASES = 2_000
GOAL = 100_000
FLAT = 1.3
SLOTS = 16
LENGTHS = (10, 100, 1_000, 10_000, 100_000)
TIERS = (Tier.FREE, Tier.PAID, Tier.SUB, Tier.FREE)
HELD = Modality.TTS


def pairs_per_second(pairs: int) -> float:
    """Ask and release so many times, 24 asks live at once on 16 slots; return pairs per second."""
    scheduler = Scheduler([PoolSpec("gpu0", SLOTS)], Rules())
    modalities = (Modality.LLM, Modality.LLM, Modality.LLM, HELD)
    asks = [Ask("gpu0", modality, tier, 1, 120.0, "p") for modality, tier in zip(modalities, TIERS, strict=True)]
    live: list[int] = []
    began = time.thread_time()
    for ticket in range(pairs):
        now = ticket * 1e-5
        scheduler.ask(ticket, asks[ticket & 3], now)
        live.append(ticket)
        if ticket & 7 == 7:
            scheduler.release(live.pop(), now)  # the newest, who most likely waits, leaves
        if len(live) > SLOTS + 8:
            scheduler.release(live.pop(0), now)
        if ticket & 1023 == 0:
            scheduler.hold(Hold("h", frozenset({"gpu0"}), frozenset({HELD}), now + 1, "bench"), now)
        elif ticket & 1023 == 512:
            scheduler.release_hold("h", now)
            scheduler.advance(now)
    for ticket in live:
        scheduler.release(ticket, 1.0)
    return pairs / (time.thread_time() - began)


def release_cost(length: int, count: int) -> float:
    """Return seconds per release, of so many, that grants to the head of a line of `length`, refilled so that it stays as long."""
    scheduler = Scheduler([PoolSpec("gpu0", SLOTS)], Rules(max_queue=length + SLOTS + 1))
    asks = [Ask("gpu0", Modality.LLM, tier, 1, 3600.0) for tier in TIERS]
    holding = []
    for ticket in range(length + SLOTS):
        scheduler.ask(ticket, asks[ticket & 3], 0.0)
        if ticket < SLOTS:
            holding.append(ticket)
    next_ticket, spent = length + SLOTS, 0.0
    for _ in range(count):
        began = time.thread_time()
        events = scheduler.release(holding.pop(0), 1.0)
        spent += time.thread_time() - began
        holding += [event.ticket for event in events]
        scheduler.ask(next_ticket, asks[next_ticket & 3], 1.0)
        next_ticket += 1
    return spent / count


def main() -> None:
    """Print both tables."""
    rates = [pairs_per_second(PAIRS) for _ in range(ROUNDS)]
    print(f"slots {SLOTS}, rounds {ROUNDS}, pairs a round {PAIRS}")
    print(f"acquire/release pairs per second: {spread(rates).show(0)} (goal {GOAL:,})")
    print(f"\nwaiters   us per release   ratio to 10 (goal {FLAT:g} at most)")
    shortest = 0.0
    for length in LENGTHS:
        cost = statistics.median(release_cost(length, RELEASES) for _ in range(ROUNDS))
        shortest = shortest or cost
        print(f"{length:>7}   {cost * 1e6:>14.2f}   {cost / shortest:>11.2f}")


if __name__ == "__main__":
    main()
