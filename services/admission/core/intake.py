"""From what a caller says to an ask that leaves nothing open: defaults, forced tiers, and refusals that name the field."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.admission.core.model import Ask, Modality, Tier

# Their owners must never be in the way of somebody who waits, whatever tier the caller has.
FORCED_BACKGROUND = frozenset({Modality.ANIMATION, Modality.THREE_D, Modality.TRAINING})
DEFAULT_TIER = Tier.FREE
ANONYMOUS = "anonymous"


class InvalidAskError(ValueError):
    """An ask that can never be served; `field` names the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Wish:
    """An ask as the caller put it; None is what was not said. `wait_s` in seconds, `units` in slots."""

    modality: Modality | None
    tier: Tier | None = None
    units: int | None = None
    may_wait: bool = True
    wait_s: float | None = None
    principal: str = ""
    pool: str | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """The house's defaults.

    `slots`: slots of each pool. `pool_of`: the pool of each modality. `units_of`: slots that a modality costs, None for
    all of its pool. `wait_s`: the wait when none is given.
    """

    slots: Mapping[str, int]
    pool_of: Mapping[Modality, str]
    units_of: Mapping[Modality, int | None]
    wait_s: float

    def default_units(self, modality: Modality, pool: str) -> int:
        """Return what the modality costs in the pool, at most all of it."""
        units, slots = self.units_of[modality], self.slots[pool]
        return slots if units is None else min(units, slots)

    def resolve(self, wish: Wish) -> Ask:
        """Return the ask to schedule. Raises InvalidAskError."""
        modality = wish.modality
        if modality is None:
            raise InvalidAskError("modality", "modality is not stated")
        pool = self.pool_of[modality] if wish.pool is None else wish.pool
        slots = self.slots.get(pool)
        if slots is None:
            raise InvalidAskError("pool", f"no pool {pool!r}; there are {', '.join(sorted(self.slots))}")
        units = self.default_units(modality, pool) if wish.units is None else wish.units
        if units > slots > 0:
            raise InvalidAskError("units", f"{units} slots asked, {pool} has {slots}")
        tier = DEFAULT_TIER if wish.tier is None else wish.tier
        return Ask(
            pool=pool,
            modality=modality,
            tier=Tier.BACKGROUND if modality in FORCED_BACKGROUND else tier,
            units=units,
            wait_s=self.wait_s if wish.wait_s is None else wish.wait_s,
            principal=wish.principal or ANONYMOUS,
            may_wait=wish.may_wait,
        )
