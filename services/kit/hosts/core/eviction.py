"""Who makes room for a model: a function of the seats, the time and the policy, and of nothing else.

Never who is pinned, held, loading or at work. First who is being loaded for nobody; then who is idle, and of those who is
idle longest for what loading it again costs; then those whose turn is over, as soon as their last request has ended.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.kit.hosts.core.seats import Key, Policy, Seat

_COST_OF_ANY_LOAD_S: Final = 1.0
"""Counted beside a load's measured time, so that models that load in no time are told apart by their idleness."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """`leaving`: who makes room now; None when that is not enough yet. `closing`: who takes no new requests meanwhile.

    `again_s`: times at which the answer may be another, although nothing happens.
    """

    leaving: tuple[Key, ...] | None
    closing: tuple[Key, ...] = ()
    again_s: tuple[float, ...] = ()


def evict(seats: Mapping[Key, Seat], missing_mib: float, policy: Policy, now_s: float) -> Eviction:
    """Return who makes room so that so much more is free, MiB."""

    def patience(key: Key) -> float:
        seat = seats[key]
        return (now_s - seat.used_s) / (_COST_OF_ANY_LOAD_S + seat.reload_s)

    abandoned = [key for key, seat in seats.items() if seat.is_abandoned]
    could = sorted((key for key, seat in seats.items() if seat.may_leave), key=patience, reverse=True)
    now = [*abandoned, *(key for key in could if seats[key].leaves_now(policy, now_s))]
    chosen, missing = _until(seats, now, missing_mib)
    if missing <= 0:
        needed = _needed(seats, chosen, missing_mib)
        return Eviction(tuple(needed), _over(seats, needed, policy, now_s))
    later = sorted((key for key in could if key not in chosen), key=lambda key: seats[key].ready_s)
    more, missing = _until(seats, later, missing)
    needed = _needed(seats, [*chosen, *more], missing_mib) if missing <= 0 else []
    again: list[float] = []
    for key in needed:
        seat = seats[key]
        again.append(seat.turn_ends_s(policy))
        if seat.active == 0 and not seat.waiters:
            again.append(seat.used_s + policy.linger_s)
    return Eviction(None, _over(seats, needed, policy, now_s), tuple(again))


def could_free_mib(seats: Mapping[Key, Seat]) -> int:
    """Return what would be free if all who may ever make room did, MiB."""
    return sum(seat.need_mib for seat in seats.values() if seat.may_leave or seat.is_abandoned)


def _over(seats: Mapping[Key, Seat], keys: Iterable[Key], policy: Policy, now_s: float) -> tuple[Key, ...]:
    return tuple(key for key in keys if now_s >= seats[key].turn_ends_s(policy))


def _needed(seats: Mapping[Key, Seat], keys: Sequence[Key], missing_mib: float) -> list[Key]:
    """Return the models without those whose room the others make superfluous."""
    needed = list(keys)
    for key in keys:
        if sum(seats[other].need_mib for other in needed if other != key) >= missing_mib:
            needed.remove(key)
    return needed


def _until(seats: Mapping[Key, Seat], keys: Iterable[Key], missing_mib: float) -> tuple[list[Key], float]:
    """Return as many of the models as free what is missing, and what is still missing then."""
    chosen: list[Key] = []
    for key in keys:
        if missing_mib <= 0:
            break
        chosen.append(key)
        missing_mib -= seats[key].need_mib
    return chosen, missing_mib
