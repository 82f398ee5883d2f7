"""The states of a model, as a table, and how long to wait before its host is started again."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


class State(Enum):
    """Whether a model can serve."""

    AVAILABLE = "available"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


class Event(Enum):
    """What happens to a model's host."""

    START = "start"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    DIED = "died"
    STOP = "stop"
    STOPPED = "stopped"


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.AVAILABLE, Event.START): State.LOADING,
        (State.FAILED, Event.START): State.LOADING,
        (State.LOADING, Event.LOADED): State.READY,
        (State.LOADING, Event.LOAD_FAILED): State.FAILED,
        (State.LOADING, Event.DIED): State.FAILED,
        (State.READY, Event.DIED): State.FAILED,
        (State.LOADING, Event.STOP): State.UNLOADING,
        (State.READY, Event.STOP): State.UNLOADING,
        (State.FAILED, Event.STOP): State.AVAILABLE,
        (State.UNLOADING, Event.STOPPED): State.AVAILABLE,
        (State.UNLOADING, Event.DIED): State.AVAILABLE,
    }
)


class IllegalTransitionError(Exception):
    """An event that cannot happen in the present state."""


def after(state: State, event: Event) -> State:
    """Return the state after an event. Raises IllegalTransitionError."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise IllegalTransitionError(f"{event.value} cannot happen to a model that is {state.value}")
    return following


@dataclass(frozen=True, slots=True)
class BackOff:
    """Pauses between restarts, seconds: the first at once, then doubling; forgotten after `calm_s` of serving."""

    first_s: float = 0.5
    most_s: float = 30.0
    calm_s: float = 60.0

    def pause_s(self, failures: int) -> float:
        """Return how long to wait after this many failures in a row."""
        if failures <= 1:
            return 0.0
        return float(min(self.most_s, self.first_s * 2.0 ** min(failures - 2, 30)))

    def failures(self, before: int, *, served_s: float) -> int:
        """Return the failures in a row after one more, when the host had served for `served_s`."""
        return 1 if served_s >= self.calm_s else before + 1


def is_stuck(*, active: int, silent_s: float, limit_s: float) -> bool:
    """Return whether a host that has work has not finished a step for too long. `limit_s` 0 turns the check off."""
    return limit_s > 0 and active > 0 and silent_s > limit_s
