"""A lease as its holder sees it: when it is renewed, how it ended, and what a broker's denial means. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from services.kit.hosts.core.seats import Why

FIRST_RENEWAL_S: Final = 1.0
"""When the broker first hears which process allocates: it is known only when the lease is there."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0


class End(Enum):
    """How a lease ends, as the contract has it."""

    DONE = 1
    IDLE = 2
    EVICTED = 3
    RECLAIMED = 4
    LOAD_FAILED = 5
    CRASHED = 6
    SHUTDOWN = 7


ENDS: Final[Mapping[Why, End]] = MappingProxyType(
    {
        Why.EVICTED: End.EVICTED,
        Why.IDLE: End.IDLE,
        Why.ORDERED: End.DONE,
        Why.ABANDONED: End.LOAD_FAILED,
        Why.RECLAIMED: End.RECLAIMED,
        Why.LOST: End.DONE,
    }
)


class Refusal(Enum):
    """What a denial means to who asked."""

    FULL = "full"  # others hold the room; making some helps
    LATER = "later"  # nobody knows what is free, or nothing is granted now: asking again helps
    NEVER = "never"  # the device is too small
    OFF = "off"  # nothing is leased here at all


# By the contract's numbers of DenialReason.
REFUSALS: Final[Mapping[int, Refusal]] = MappingProxyType(
    {
        1: Refusal.FULL,
        2: Refusal.LATER,
        3: Refusal.LATER,
        4: Refusal.NEVER,
        5: Refusal.FULL,
        6: Refusal.OFF,
    }
)


@dataclass(frozen=True, slots=True)
class Want:
    """What is asked for. `device`: empty lets the broker choose; `rank`: as in Waiter; `reload_s`: None when not known.

    `wait_s`: how long to wait for room, which others are asked to make then. `profile`: names this way of running the model;
    `file_mib`: its weights as files.
    """

    model: str
    size_mib: int
    device: str
    rank: int
    wait_s: float
    reclaimable: bool
    reload_s: float | None = None
    profile: str = ""
    file_mib: int = 0


def next_renewal_in(*, ttl_s: float, since_s: float, renewals: int, failures: int, now_s: float) -> float:
    """Return the seconds until the next renewal of a lease that was granted or renewed last at `since_s`.

    After failures in a row the pauses grow, but never so long that a broker which is back finds the lease expired.
    """
    if failures:
        return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_S)
    pause_s = min(FIRST_RENEWAL_S, ttl_s / 3) if renewals == 0 else ttl_s / 3
    return max(0.0, since_s + pause_s - now_s)
