"""What can be seen of the scheduler from outside: values, made when somebody looks."""

from dataclasses import dataclass

from services.admission.core.model import BEST_FIRST, Hold, Modality, Tier
from services.admission.core.pool import Pool
from services.admission.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier of a pool; totals count since start, by the tier that was asked for."""

    tier: Tier
    waiting: int
    granted: int
    rejected: int
    timed_out: int
    cancelled: int
    worst_wait_s: float


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool. `drain_rate` is permits per second, None while nothing has drained."""

    name: str
    slots: int
    in_use: int
    permits: int
    waiting: int
    max_waiting: int
    max_in_use: int
    tiers: tuple[TierView, ...]
    holds: tuple[Hold, ...]
    drain_rate: float | None


@dataclass(frozen=True, slots=True)
class Pressure:
    """The queue of one pool, tier and modality."""

    pool: str
    tier: Tier
    modality: Modality
    depth: int
    worst_wait_s: float


def view(scheduler: Scheduler, now: float) -> tuple[PoolView, ...]:
    """Return every pool as it is at `now`."""
    return tuple(_pool_view(pool, scheduler, now) for pool in scheduler.pools.values())


def pressure(scheduler: Scheduler, now: float) -> tuple[Pressure, ...]:
    """Return one entry per pool, tier and modality with anybody waiting, best tiers first."""
    found = [
        Pressure(pool.name, tier, modality, depth, now - since)
        for pool in scheduler.pools.values()
        for tier, modality, depth, since in pool.census.groups()
    ]
    return tuple(sorted(found, key=lambda each: (each.pool, -each.tier, each.modality)))


def free_slots(scheduler: Scheduler) -> dict[str, int]:
    """Return the free slots of each pool."""
    return {pool.name: max(0, pool.slots - pool.in_use) for pool in scheduler.pools.values()}


def _pool_view(pool: Pool, scheduler: Scheduler, now: float) -> PoolView:
    return PoolView(
        name=pool.name,
        slots=pool.slots,
        in_use=pool.in_use,
        permits=pool.permits,
        waiting=pool.waiting,
        max_waiting=pool.counters.max_waiting,
        max_in_use=pool.counters.max_in_use,
        tiers=tuple(_tier_view(pool, tier, now) for tier in BEST_FIRST),
        holds=tuple(hold for hold in scheduler.holds.values() if pool.name in hold.pools),
        drain_rate=pool.drain_rate.per_second(now),
    )


def _tier_view(pool: Pool, tier: Tier, now: float) -> TierView:
    groups = [(depth, since) for of, _, depth, since in pool.census.groups() if of is tier]
    return TierView(
        tier=tier,
        waiting=sum(depth for depth, _ in groups),
        granted=pool.counters.granted[tier],
        rejected=pool.counters.rejected[tier],
        timed_out=pool.counters.timed_out[tier],
        cancelled=pool.counters.cancelled[tier],
        worst_wait_s=max((now - since for _, since in groups), default=0.0),
    )
