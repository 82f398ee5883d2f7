"""What a refused caller is told: one sentence with the numbers."""

from typing import NamedTuple

from services.admission.core.model import Ask, Refusal

DRAINING = "admission is shutting down"
# A restart takes about this long: what a caller refused by a draining admission is told.
RESTART_S = 2.0


class Scene(NamedTuple):
    """The pool at the time of the refusal."""

    pool: str
    slots: int
    in_use: int
    waiting: int
    max_queue: int


def sentence(refusal: Refusal, ask: Ask, scene: Scene, *, waited_s: float) -> str:
    """Return why the ask got no permit."""
    state = f"{scene.in_use} of {scene.slots} slots of {scene.pool} are in use and {scene.waiting} asks wait"
    match refusal:
        case Refusal.QUEUE_FULL:
            return f"the queue of {scene.pool} is full: {scene.waiting} of at most {scene.max_queue} asks wait"
        case Refusal.ADMISSION_TIMEOUT:
            waited = f"waited {waited_s:.1f} s for {ask.units} slots at tier {ask.tier.name.lower()}"
            return f"{waited}; {state}; better tiers are always served first"
        case Refusal.SATURATED:
            return f"{ask.units} slots are not free at once: {state}"
        case Refusal.DRAINING:
            return DRAINING
        case Refusal.NO_CAPACITY:
            return f"pool {scene.pool} has no slots"
        case Refusal.INVALID_REQUEST:
            return f"{ask.units} slots asked, {scene.pool} has {scene.slots}"
