"""The words of admission: what is asked, what is decided, what happened. Values only.

What is made once per request is a named tuple rather than a frozen dataclass: it is as immutable and costs a third.
Times are seconds of one monotonic clock; durations are seconds.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Tier(IntEnum):
    """Rank of a caller; greater is served first. The numbers are those of the contract."""

    BACKGROUND = 1
    FREE = 2
    SUB = 3
    PAID = 4


BEST_FIRST = (Tier.PAID, Tier.SUB, Tier.FREE, Tier.BACKGROUND)


class Modality(IntEnum):
    """What the device is wanted for. The numbers are those of the contract."""

    LLM = 1
    EMBEDDING = 2
    IMAGE = 3
    TTS = 4
    STT = 5
    MULTIMODAL = 6
    ANIMATION = 7
    THREE_D = 8
    VIDEO = 9
    FORECAST = 10
    CUTOUT = 11
    TRAINING = 12
    AUX = 13


ALL_MODALITIES = frozenset(Modality)


class Refusal(StrEnum):
    """Why an ask got no permit; the values are the constant reasons of the contract."""

    QUEUE_FULL = "queue_full"
    ADMISSION_TIMEOUT = "admission_timeout"
    SATURATED = "saturated"
    DRAINING = "draining"
    NO_CAPACITY = "no_capacity"
    INVALID_REQUEST = "invalid_request"


class Ask(NamedTuple):
    """One request for a permit, resolved: nothing in it is left to a default.

    `units` are slots of `pool`; 0 takes none and waits for nobody. `wait_s` is how long it may wait; 0 means not at all.
    `may_wait` False is `try`: refused also while anybody else waits.
    """

    pool: str
    modality: Modality
    tier: Tier
    units: int
    wait_s: float
    principal: str = "anonymous"
    may_wait: bool = True


class Queued(NamedTuple):
    """The ask waits at `position` (1 is next, 0 is parked); `eta_s` is None while nothing has drained yet."""

    ticket: int
    position: int
    eta_s: float | None


class Granted(NamedTuple):
    """The ticket holds its slots from now on."""

    ticket: int
    waited_s: float


class YieldRequested(NamedTuple):
    """The background holder should leave soon: somebody of `waiting_tier` waits for what it holds."""

    ticket: int
    waiting_tier: Tier


class Rejected(NamedTuple):
    """The ask is over without a permit; `retry_after_s` is None while nothing is known about the drain rate."""

    ticket: int
    refusal: Refusal
    message: str
    retry_after_s: float | None


Event = Queued | Granted | YieldRequested | Rejected


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A device and how many slots it has; 0 slots means that nothing is ever granted there."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What is a matter of policy: the longest queue of a pool, ageing (seconds per tier, None is off), fair share."""

    max_queue: int = 10_000
    ageing_s: float | None = None
    fair_share: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Stops grants of `modalities` in `pools` until `until`; permits in `excluded` are not waited for."""

    hold_id: str
    pools: frozenset[str]
    modalities: frozenset[Modality]
    until: float
    reason: str
    excluded: frozenset[int] = frozenset()
