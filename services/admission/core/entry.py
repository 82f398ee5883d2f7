"""One ask from its arrival to its end, and the table of what may happen to it."""

from enum import IntEnum, auto

from services.admission.core.model import Ask, Tier

# Place inside a tier: fair share's start tag (0 without it), then the order of arrival.
Key = tuple[float, int]


class State(IntEnum):
    """Where an ask stands."""

    WAITING = auto()
    PARKED = auto()
    HOLDING = auto()
    GONE = auto()


class Move(IntEnum):
    """What can happen to an ask."""

    GRANT = auto()
    PARK = auto()
    READY = auto()
    EXPIRE = auto()
    LEAVE = auto()


# What is not in the table does not happen: `park` that crosses a grant on the wire, for one, changes nothing, and the
# caller learns from `granted` that it was too late.
MOVES: dict[tuple[State, Move], State] = {
    (State.WAITING, Move.GRANT): State.HOLDING,
    (State.WAITING, Move.PARK): State.PARKED,
    (State.WAITING, Move.EXPIRE): State.GONE,
    (State.WAITING, Move.LEAVE): State.GONE,
    (State.PARKED, Move.READY): State.WAITING,
    (State.PARKED, Move.EXPIRE): State.GONE,
    (State.PARKED, Move.LEAVE): State.GONE,
    (State.HOLDING, Move.LEAVE): State.GONE,
}


class Entry:
    """An ask and its present standing; only its pool changes it.

    `tier` is the tier it is served at, which ageing lifts above the tier asked for. `told` is the place that its caller
    knows, 0 for none, and `told_at` when it was told, or when it came.
    """

    __slots__ = ("ask", "asked_at", "deadline", "key", "lift_at", "state", "ticket", "tier", "told", "told_at")

    def __init__(self, ticket: int, ask: Ask, now: float) -> None:
        self.ticket = ticket
        self.ask = ask
        self.tier: Tier = ask.tier
        self.asked_at = now
        self.deadline = now + ask.wait_s
        self.key: Key = (0.0, 0)
        self.lift_at: float | None = None
        self.state = State.WAITING
        self.told = 0
        self.told_at = now
