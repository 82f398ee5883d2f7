"""Which models are in memory: who is loaded next, who makes room for it, and who may be used now.

A seat is charged before its load begins and credited when its process is gone. Whoever waits longest in the best tier is
served first, and nobody behind it takes the room that it waits for. A model makes room when it is idle, or when its turn
is over: then it takes no new requests until those it works on have ended. So two models that do not fit together
alternate at the pace of turns, not of requests.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
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
_CHARGED: Final = frozenset({Phase.LOADING, Phase.RESIDENT, Phase.LEAVING})


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
class Ask:
    """Get leave to load: a permit at `rank`, or none for the operator; then `commit`."""

    key: Key
    rank: int
    operator: bool


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody wants the load any more that leave was asked for."""

    key: Key


@dataclass(frozen=True, slots=True)
class Load:
    """Start the host; then `loaded` or `gone`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Unload:
    """End the host; then `gone`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Refuse:
    """The model can never fit: `most_mib` is what pinned models leave of the budget."""

    key: Key
    need_mib: int
    most_mib: int


Action = Ask | Withdraw | Load | Unload | Refuse


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and when to decide again although nothing happens; None is never."""

    actions: tuple[Action, ...]
    again_s: float | None


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
    `rests_until_s`: it is not loaded again before, since its last load failed.
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


class Residency:
    """The seats of all models. Times are seconds of one clock."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._seats: dict[Key, Seat] = {}
        self._closing: set[Key] = set()
        self._again_s = math.inf

    # ---- the catalogue ----------------------------------------------------------------------------------------

    def add(self, key: Key, *, need_mib: int, pinned: bool, ttl_s: float) -> None:
        """Know a model that is not in memory. `ttl_s` 0: it stays however long it is idle."""
        self._seats[key] = Seat(need_mib, pinned, ttl_s)

    def adjust(self, key: Key, *, pinned: bool, ttl_s: float) -> None:
        """Change how a model is kept."""
        seat = self._seats[key]
        seat.pinned, seat.ttl_s = pinned, ttl_s

    def forget(self, key: Key) -> None:
        """Know a model no more, which must be absent. Raises IllegalChangeError."""
        if self._seats[key].phase is not Phase.ABSENT:
            raise IllegalChangeError("a model must leave memory before it is forgotten")
        del self._seats[key]

    def seat(self, key: Key) -> Seat:
        """Return a model's seat, to be read."""
        return self._seats[key]

    @property
    def charged_mib(self) -> int:
        """What all models take, those that load or leave included."""
        return sum(seat.need_mib for seat in self._seats.values() if seat.phase in _CHARGED)

    # ---- requests ---------------------------------------------------------------------------------------------

    def want(self, key: Key, ticket: int, waiter: Waiter) -> None:
        """Let somebody wait for a model; `ticket` is unique."""
        self._seats[key].waiters[ticket] = waiter

    def leave(self, key: Key, ticket: int) -> None:
        """Let somebody wait no more."""
        seat = self._seats.get(key)
        if seat is not None:
            seat.waiters.pop(ticket, None)

    def usable(self, key: Key) -> bool:
        """Return whether a request may use the model now."""
        seat = self._seats.get(key)
        return seat is not None and seat.phase is Phase.RESIDENT and not seat.held and key not in self._closing

    def begin(self, key: Key) -> None:
        """Note that a request uses the model."""
        self._seats[key].active += 1

    def end(self, key: Key, now_s: float) -> None:
        """Note that a request has ended."""
        seat = self._seats[key]
        seat.active -= 1
        seat.used_s = now_s

    # ---- memory -----------------------------------------------------------------------------------------------

    def loaded(self, key: Key, now_s: float) -> None:
        """Note that the model serves: its turn begins, unless it only came back."""
        seat = self._seats[key]
        if seat.phase is Phase.LOADING:
            seat.ready_s = seat.used_s = now_s
        seat.change(Change.LOADED)

    def gone(self, key: Key) -> None:
        """Note that the model's process is gone, and its memory with it."""
        self._seats[key].change(Change.GONE)

    def rest(self, key: Key, until_s: float) -> None:
        """Let a model not be loaded again before a time."""
        self._seats[key].rests_until_s = until_s

    def hold(self, key: Key, *, held: bool) -> None:
        """Let nobody use or load a model, or let them again."""
        self._seats[key].held = held

    def dismiss(self, key: Key) -> list[Action]:
        """Return what unloads a model, whatever waits for it."""
        seat = self._seats[key]
        if seat.phase is Phase.ADMITTED:
            seat.change(Change.WITHDRAW)
        if seat.phase not in {Phase.LOADING, Phase.RESIDENT}:
            return []
        seat.change(Change.DISMISS)
        return [Unload(key)]

    def refused_leave(self, key: Key) -> None:
        """Note that leave to load was asked for and not given."""
        self._seats[key].asked_rank = None

    def commit(self, key: Key, now_s: float) -> tuple[bool, list[Action]]:
        """Use the leave to load a model: return whether there is room for it now, and what makes it.

        What was idle when leave was asked for may be in use again. Then leave is to be given back.
        """
        seat = self._seats[key]
        seat.asked_rank = None
        if not seat.is_wanted(now_s) or seat.phase is not Phase.ABSENT:
            return False, []
        missing = seat.need_mib - self._room(besides=key) - self._leaving()
        victims = self._victims(missing, now_s)
        if victims is None:
            return False, []
        actions = [action for victim in victims for action in self.dismiss(victim)]
        seat.change(Change.ADMIT)
        return True, actions

    # ---- deciding ---------------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> Decision:
        """Return what to do now."""
        self._closing.clear()
        self._again_s = math.inf
        actions: list[Action] = self._settled()
        actions += self._expired(now_s)
        for key in self._in_order(now_s):
            more, goes_on = self._advance(key, now_s)
            actions += more
            if not goes_on:
                break
        return Decision(tuple(actions), None if self._again_s == math.inf else self._again_s)

    def _settled(self) -> list[Action]:
        """Take back what nobody waits for any more, and what should be asked for at a better rank."""
        actions: list[Action] = []
        for key, seat in self._seats.items():
            waits = bool(seat.waiters) and not seat.held
            if not waits and seat.phase is Phase.ADMITTED:
                seat.change(Change.WITHDRAW)
            if seat.asked_rank is not None and (not waits or seat.best.rank > seat.asked_rank):
                seat.asked_rank = None
                actions.append(Withdraw(key))
        return actions

    def _expired(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for key, seat in self._seats.items():
            if not seat.may_leave or seat.active or seat.waiters or seat.ttl_s <= 0:
                continue
            if now_s >= seat.used_s + seat.ttl_s:
                actions += self.dismiss(key)
            else:
                self._look_again(seat.used_s + seat.ttl_s, now_s)
        return actions

    def _in_order(self, now_s: float) -> list[Key]:
        """Return the models that wait to be loaded: room that is reserved first, then the best tier, then the longest wait."""

        def order(key: Key) -> tuple[bool, int, float]:
            seat = self._seats[key]
            since_s = min(waiter.since_s for waiter in seat.waiters.values())
            return (seat.phase is not Phase.ADMITTED, -seat.best.rank, since_s)

        for seat in self._seats.values():
            if seat.waiters:
                self._look_again(seat.rests_until_s, now_s)
        return sorted((key for key, seat in self._seats.items() if seat.is_wanted(now_s)), key=order)

    def _advance(self, key: Key, now_s: float) -> tuple[list[Action], bool]:
        """Return what brings a model nearer to memory, and whether those behind it may go on too."""
        seat = self._seats[key]
        if seat.phase is Phase.ADMITTED:
            if seat.need_mib > self._budget() - self.charged_mib:
                return [], False
            seat.change(Change.START)
            seat.began_s = now_s
            return [Load(key)], True
        most_mib = self._budget() - sum(s.need_mib for k, s in self._seats.items() if k != key and self._stays(s))
        if seat.need_mib > most_mib:
            return [Refuse(key, seat.need_mib, int(most_mib))], True
        missing = seat.need_mib - self._room(besides=key) - self._leaving()
        victims = self._victims(missing, now_s)
        if victims is None or seat.is_asking:
            return [], seat.is_asking
        seat.asked_rank = seat.best.rank
        return [Ask(key, seat.best.rank, seat.best.operator)], True

    def _victims(self, missing_mib: float, now_s: float) -> list[Key] | None:
        """Return who makes room now, least recently used first; None when it is not enough yet.

        Whose turn is over takes no new requests from now on, as far as its room is needed.
        """
        abandoned = [k for k, s in self._seats.items() if s.is_abandoned]
        could = sorted((k for k, s in self._seats.items() if s.may_leave), key=lambda k: self._seats[k].used_s)
        now = [*abandoned, *(k for k in could if self._leaves_now(self._seats[k], now_s))]
        chosen, missing = self._until(now, missing_mib)
        if missing <= 0:
            needed = self._needed(chosen, missing_mib)
            self._close(needed, now_s)
            return needed
        later = sorted((k for k in could if k not in chosen), key=lambda k: self._seats[k].ready_s)
        more, missing = self._until(later, missing)
        needed = self._needed([*chosen, *more], missing_mib) if missing <= 0 else []
        self._close(needed, now_s)
        for key in needed:
            seat = self._seats[key]
            self._look_again(self._turn_ends_s(seat), now_s)
            if seat.active == 0 and not seat.waiters:
                self._look_again(seat.used_s + self._policy.linger_s, now_s)
        return None

    def _needed(self, keys: Sequence[Key], missing_mib: float) -> list[Key]:
        """Return the models without those whose room the others make superfluous."""
        needed = list(keys)
        for key in keys:
            if sum(self._seats[other].need_mib for other in needed if other != key) >= missing_mib:
                needed.remove(key)
        return needed

    def _until(self, keys: Iterable[Key], missing_mib: float) -> tuple[list[Key], float]:
        """Return as many of the models as free what is missing, and what is still missing then."""
        chosen: list[Key] = []
        for key in keys:
            if missing_mib <= 0:
                break
            chosen.append(key)
            missing_mib -= self._seats[key].need_mib
        return chosen, missing_mib

    def _close(self, keys: Iterable[Key], now_s: float) -> None:
        self._closing.update(key for key in keys if now_s >= self._turn_ends_s(self._seats[key]))

    def _leaves_now(self, seat: Seat, now_s: float) -> bool:
        if seat.active:
            return False
        return now_s >= self._turn_ends_s(seat) or (not seat.waiters and now_s >= seat.used_s + self._policy.linger_s)

    def _turn_ends_s(self, seat: Seat) -> float:
        return seat.ready_s + max(self._policy.turn_s, seat.ready_s - seat.began_s)

    def _look_again(self, at_s: float, now_s: float) -> None:
        if at_s > now_s:
            self._again_s = min(self._again_s, at_s)

    def _budget(self) -> float:
        return math.inf if self._policy.budget_mib is None else self._policy.budget_mib

    def _room(self, *, besides: Key) -> float:
        """Return what is neither charged nor promised to another, MiB."""
        promised = sum(
            seat.need_mib
            for key, seat in self._seats.items()
            if key != besides and (seat.phase is Phase.ADMITTED or seat.is_asking)
        )
        return self._budget() - self.charged_mib - promised

    def _leaving(self) -> int:
        return sum(seat.need_mib for seat in self._seats.values() if seat.phase is Phase.LEAVING)

    def _stays(self, seat: Seat) -> bool:
        """Return whether a model's room can never be had by another."""
        return seat.pinned and seat.phase in {Phase.LOADING, Phase.RESIDENT}
