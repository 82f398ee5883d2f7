"""A model's place in memory: its phases as a table, who waits for it, and how long its turn lasts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

Key = int


class Phase(Enum):
    """How far a model's memory is."""

    ABSENT = "absent"
    ADMITTED = "admitted"  # its room is reserved; what made room is still leaving
    LOADING = "loading"
    RESIDENT = "resident"
    LEAVING = "leaving"


class Change(Enum):
    """What happens to a model's memory."""

    ADMIT = "admit"
    WITHDRAW = "withdraw"
    START = "start"
    LOADED = "loaded"
    DISMISS = "dismiss"
    GONE = "gone"


TRANSITIONS: Final[Mapping[tuple[Phase, Change], Phase]] = MappingProxyType(
    {
        (Phase.ABSENT, Change.ADMIT): Phase.ADMITTED,
        (Phase.ADMITTED, Change.WITHDRAW): Phase.ABSENT,
        (Phase.ADMITTED, Change.START): Phase.LOADING,
        (Phase.LOADING, Change.LOADED): Phase.RESIDENT,
        (Phase.RESIDENT, Change.LOADED): Phase.RESIDENT,  # its host died and is back
        (Phase.LOADING, Change.DISMISS): Phase.LEAVING,
        (Phase.RESIDENT, Change.DISMISS): Phase.LEAVING,
        (Phase.LEAVING, Change.LOADED): Phase.LEAVING,  # said while it was being stopped
        (Phase.LOADING, Change.GONE): Phase.ABSENT,
        (Phase.RESIDENT, Change.GONE): Phase.ABSENT,
        (Phase.LEAVING, Change.GONE): Phase.ABSENT,
    }
)
CHARGED: Final = frozenset({Phase.LOADING, Phase.RESIDENT, Phase.LEAVING})
"""Phases in which a model takes memory, or may."""


class Why(Enum):
    """Why a model leaves memory."""

    EVICTED = "evicted"  # for another of this service's models
    IDLE = "idle"
    ORDERED = "ordered"  # by the operator, or by the catalogue
    ABANDONED = "abandoned"  # nobody waited for its load any more
    RECLAIMED = "reclaimed"  # another process needs the room
    LOST = "lost"  # its lease is over


class IllegalChangeError(Exception):
    """A change that cannot happen in the present phase."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`budget_mib`: memory of all models together, None is without limit.

    `turn_s`: how long a model serves before it must make room for another that waits; longer if its load took longer, so
    that no more than half of the time goes into loads. `linger_s`: how long it must have
    been idle to make room earlier, so that the next request of a caller in a loop still finds it.
    """

    budget_mib: int | None = None
    turn_s: float = 3.0
    linger_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody who wants a model. `rank`: larger is better."""

    rank: int
    since_s: float
    operator: bool = False


@dataclass(slots=True)
class Seat:
    """A model's place. `active`: requests that use it; `began_s`: when its load began; `ready_s`: when its turn did; `used_s`: when its last use ended.

    `held`: the operator lets nobody use or load it. `asked_rank`: leave to load it is being asked for, as this important.
    `rests_until_s`: it is not loaded again before, since its last load failed. `must_leave`: its memory is not ours any
    more; it takes no new requests. `why`: why it left last. `left_s`: when that was over. `displaced`: who left for it.
    """

    need_mib: int
    pinned: bool
    ttl_s: float
    phase: Phase = Phase.ABSENT
    active: int = 0
    waiters: dict[int, Waiter] = field(default_factory=dict)
    began_s: float = 0.0
    ready_s: float = -math.inf
    used_s: float = -math.inf
    held: bool = False
    asked_rank: int | None = None
    rests_until_s: float = -math.inf
    must_leave: bool = False
    why: Why = Why.ORDERED
    left_s: float = -math.inf
    displaced: tuple[Key, ...] = ()

    def change(self, change: Change) -> None:
        """Enter the next phase. Raises IllegalChangeError."""
        following = TRANSITIONS.get((self.phase, change))
        if following is None:
            raise IllegalChangeError(f"{change.value} cannot happen to a model that is {self.phase.value}")
        self.phase = following

    @property
    def is_asking(self) -> bool:
        """Whether leave to load it is being asked for."""
        return self.asked_rank is not None

    @property
    def best(self) -> Waiter:
        """The most important of its waiters, of whom there must be one; the operator before everybody."""
        return max(self.waiters.values(), key=lambda waiter: (waiter.operator, waiter.rank))

    def is_wanted(self, now_s: float) -> bool:
        """Return whether it waits to be loaded."""
        waits = self.phase is Phase.ADMITTED or (self.phase is Phase.ABSENT and now_s >= self.rests_until_s)
        return waits and bool(self.waiters) and not self.held

    @property
    def is_abandoned(self) -> bool:
        """Whether it is being loaded for nobody."""
        return self.phase is Phase.LOADING and not (self.waiters or self.held or self.pinned)

    @property
    def may_leave(self) -> bool:
        """Whether it could ever make room for another."""
        return not self.pinned and not self.held and self.phase is Phase.RESIDENT

    @property
    def stays(self) -> bool:
        """Whether its room can never be had by another."""
        return self.pinned and self.phase in {Phase.LOADING, Phase.RESIDENT}

    def turn_ends_s(self, policy: Policy) -> float:
        """Return when it must make room for another that waits."""
        return self.ready_s + max(policy.turn_s, self.reload_s)

    def leaves_now(self, policy: Policy, now_s: float) -> bool:
        """Return whether it makes room at once: it is idle, and its turn is over or nobody comes back to it."""
        if self.active:
            return False
        return now_s >= self.turn_ends_s(policy) or (not self.waiters and now_s >= self.used_s + policy.linger_s)

    @property
    def reload_s(self) -> float:
        """How long its last load took, seconds; 0 when it never was loaded."""
        return max(0.0, self.ready_s - self.began_s) if self.ready_s > -math.inf else 0.0
