"""The values of the ledger. Memory in MiB of 1,048,576 bytes, times in seconds of the ledger's clock.

Those that every call makes anew are msgspec's structs, which are made, changed and stored many times faster than frozen
dataclasses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import msgspec

_NO_USE: Final[Mapping[int, int]] = MappingProxyType({})


class Tier(IntEnum):
    """Who asks; a better tier has the greater number. The numbers are the contract's."""

    BACKGROUND = 1
    FREE = 2
    SUB = 3
    PAID = 4


_QUARTERS: Final = MappingProxyType({Tier.PAID: 4, Tier.SUB: 2, Tier.FREE: 1, Tier.BACKGROUND: 0})


def floor_for(tier: Tier, keep_free_mib: int) -> int:
    """Return what a lease of the tier must leave free: paid may use all of the floor, sub half, free a quarter."""
    return keep_free_mib - keep_free_mib * _QUARTERS[tier] // 4


class Kind(IntEnum):
    """What a device is. The numbers are the contract's."""

    GPU = 1
    HOST = 2


class Source(IntEnum):
    """How it is known what of a lease is allocated. The numbers are the contract's."""

    UNKNOWN = 0
    TENANT = 1
    DRIVER = 2


class Why(IntEnum):
    """Why nothing was granted. The numbers are the contract's."""

    NO_HEADROOM = 1
    DRIVER_UNKNOWN = 2
    SETTLING = 3
    LARGER_THAN_DEVICE = 4
    WAIT_OVER = 5
    DISABLED = 6


class End(IntEnum):
    """How a lease ended. The numbers are the contract's."""

    DONE = 1
    IDLE = 2
    EVICTED = 3
    RECLAIMED = 4
    LOAD_FAILED = 5
    CRASHED = 6
    SHUTDOWN = 7
    EXPIRED = 8
    REVOKED = 9


@dataclass(frozen=True, slots=True)
class Rules:
    """What the owner of the box decided. `reserved_mib` by device."""

    keep_free_mib: int = 1024
    default_ttl_s: int = 120
    max_ttl_s: int = 3600
    reserved_mib: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """What the driver said about a device. `mark`: the ledger's, from before the driver was asked.

    `used_mib`: by process, as far as the driver attributes it; None when it does not.
    """

    mark: int
    at: float
    total_mib: int
    free_mib: int
    used_mib: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a device's figures are not known, and when the driver is asked again."""

    message: str
    retry_at: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What a device is."""

    device: str
    name: str
    kind: Kind


class Wanted(msgspec.Struct, frozen=True):
    """Memory wanted on one device; `device` "" leaves the choice. `materialised_mib`: allocated already."""

    device: str
    size_mib: int
    min_size_mib: int
    materialised_mib: int = 0


class Ask(msgspec.Struct, frozen=True):
    """A request for memory, checked. `digest` tells asks under one idempotency key apart; `key` "" means none."""

    tenant: str
    items: tuple[Wanted, ...]
    tier: Tier
    ttl_s: int
    pid: int = 0
    reclaimable: bool = False
    purpose: str = ""
    key: str = ""
    digest: str = ""
    reload_cost_s: float | None = None


class Item(msgspec.Struct, frozen=True):
    """Memory held on one device. `reported_mib`: what the tenant said it has allocated; None leaves it to the driver.

    `baseline_mib`: what its process had on the device when the lease began and does not belong to it.
    """

    device: str
    size_mib: int
    reported_mib: int | None = None
    baseline_mib: int = 0


class Lease(msgspec.Struct, frozen=True):
    """A live lease."""

    lease_id: str
    tenant: str
    items: tuple[Item, ...]
    tier: Tier
    ttl_s: int
    granted_at: float
    ends_at: float
    pid: int = 0
    reclaimable: bool = False
    purpose: str = ""
    key: str = ""
    digest: str = ""
    reload_cost_s: float | None = None
    renewals: int = 0

    def on(self, device: str) -> Item | None:
        """Return what it holds on a device, or None."""
        for item in self.items:
            if item.device == device:
                return item
        return None


class Held(msgspec.Struct, frozen=True):
    """What a lease holds on one device, with what is known of it."""

    device: str
    size_mib: int
    materialised_mib: int
    source: Source


@dataclass(frozen=True, slots=True)
class Denied:
    """What stood in the way. `headroom_mib`: the tier's room on `device` now; None when unknown or about no device."""

    why: Why
    message: str
    device: str = ""
    headroom_mib: int | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A denial, kept for the operator."""

    ask: Ask
    denied: Denied
    at: float


class Report(msgspec.Struct, frozen=True):
    """What a renewal says about one device; None leaves it as it was."""

    device: str
    materialised_mib: int | None = None
    size_mib: int | None = None


class Renewal(msgspec.Struct, frozen=True):
    """What a renewal changes; None keeps it."""

    reports: tuple[Report, ...] = ()
    ttl_s: int | None = None
    reclaimable: bool | None = None
    pid: int | None = None


class RefusedError(Exception):
    """A request that the ledger cannot understand; `field` is the contract's name of what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownDeviceError(RefusedError):
    """A device that does not exist."""


class UnknownLeaseError(RefusedError):
    """A lease that was never granted, or is over."""


class KeyConflictError(RefusedError):
    """An idempotency key that is in use with other contents."""
