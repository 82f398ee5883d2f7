"""Which models are in memory: who is loaded next, who makes room for it, and who may be used now.

A seat is charged before its load begins and credited when its process is gone. Whoever waits longest in the best tier is
served first, and nobody behind it takes the room that it waits for. A model makes room when it is idle, or when its turn
is over: then it takes no new requests until those it works on have ended. So two models that do not fit together
alternate at the pace of turns, not of requests.

Where memory is leased from somebody else, a refusal says how much there is. That is the ceiling below which the models make
room for each other as they do below a budget; it is forgotten after a moment, since the others come and go.
"""

import math
from dataclasses import dataclass

from services.kit.hosts.core.eviction import could_free_mib, evict
from services.kit.hosts.core.seats import CHARGED, Change, IllegalChangeError, Key, Phase, Policy, Seat, Waiter, Why


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
    """Start the host; then `loaded`, `gone`, or `capped` and `gone`."""

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
class Ceiling:
    """What all models together may take as others say, MiB, and when that is to be asked again."""

    mib: float
    until_s: float


class Residency:
    """The seats of all models. Times are seconds of one clock."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._seats: dict[Key, Seat] = {}
        self._closing: set[Key] = set()
        self._ceiling: Ceiling | None = None
        self._again_s = math.inf

    # ---- the catalogue ----------------------------------------------------------------------------------------

    def add(self, key: Key, *, need_mib: int, pinned: bool, ttl_s: float) -> None:
        """Know a model that is not in memory. `ttl_s` 0: it stays however long it is idle."""
        self._seats[key] = Seat(need_mib, pinned, ttl_s)

    def adjust(self, key: Key, *, pinned: bool, ttl_s: float) -> None:
        """Change how a model is kept."""
        seat = self._seats[key]
        seat.pinned, seat.ttl_s = pinned, ttl_s

    def resize(self, key: Key, need_mib: int) -> None:
        """Charge a model otherwise from its next load on; no effect while it is charged already."""
        seat = self._seats[key]
        if seat.phase is Phase.ABSENT:
            seat.need_mib = need_mib

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
        return sum(seat.need_mib for seat in self._seats.values() if seat.phase in CHARGED)

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
        if seat is None or seat.phase is not Phase.RESIDENT:
            return False
        return not (seat.held or seat.must_leave or key in self._closing)

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
            seat.displaced = ()
        seat.change(Change.LOADED)

    def gone(self, key: Key, now_s: float) -> None:
        """Note that the model's process is gone, and its memory with it."""
        seat = self._seats[key]
        if seat.phase is Phase.LEAVING:
            seat.left_s = now_s
        seat.must_leave = False
        seat.change(Change.GONE)

    def capped(self, key: Key, room_mib: int, until_s: float) -> None:
        """Note that a load was refused its memory, of which there is so much beside what all others have; `gone` follows."""
        others_mib = self.charged_mib - self._seats[key].need_mib
        self._ceiling = Ceiling(others_mib + max(0, room_mib), until_s)

    def should_wait(self, key: Key, now_s: float, settle_s: float) -> bool:
        """Return whether a load had better wait for memory from elsewhere than be refused at once.

        So it is when no other model could make room for it, or when one has just done so, and what it had may not be
        measured free yet.
        """
        others = [seat for other, seat in self._seats.items() if other != key]
        return not any(seat.may_leave for seat in others) or any(now_s < seat.left_s + settle_s for seat in others)

    def lose(self, key: Key) -> None:
        """Note that a model's memory is not ours any more: it leaves when its last request has ended."""
        seat = self._seats[key]
        if seat.phase is Phase.RESIDENT:
            seat.must_leave = True

    def give(self, key: Key) -> list[Action]:
        """Return what gives a model's memory to another process; nothing when it is wanted here, or pinned."""
        seat = self._seats[key]
        if not seat.may_leave or seat.active or seat.waiters:
            return []
        return self.dismiss(key, Why.RECLAIMED)

    def rest(self, key: Key, until_s: float) -> None:
        """Let a model not be loaded again before a time."""
        self._seats[key].rests_until_s = until_s

    def take_displaced(self, key: Key) -> tuple[Key, ...]:
        """Return who left for a model's load, once."""
        seat = self._seats[key]
        displaced, seat.displaced = seat.displaced, ()
        return displaced

    def hold(self, key: Key, *, held: bool) -> None:
        """Let nobody use or load a model, or let them again."""
        self._seats[key].held = held

    def dismiss(self, key: Key, why: Why = Why.ORDERED) -> list[Action]:
        """Return what unloads a model, whatever waits for it."""
        seat = self._seats[key]
        if seat.phase is Phase.ADMITTED:
            seat.change(Change.WITHDRAW)
        if seat.phase not in {Phase.LOADING, Phase.RESIDENT}:
            return []
        seat.why = why
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
        left = [victim for victim in victims if not self._seats[victim].is_abandoned]
        seat.displaced = tuple(dict.fromkeys((*seat.displaced, *left)))  # the load may have been refused before
        actions = [
            action
            for victim in victims
            for action in self.dismiss(victim, Why.ABANDONED if self._seats[victim].is_abandoned else Why.EVICTED)
        ]
        seat.change(Change.ADMIT)
        return True, actions

    # ---- deciding ---------------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> Decision:
        """Return what to do now."""
        self._forget_ceiling(now_s)
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

    def _forget_ceiling(self, now_s: float) -> None:
        """Forget an old ceiling, but not while somebody makes room below it: who closes must not open again for that."""
        makes_room = self._closing or any(
            seat.is_asking or seat.phase in {Phase.ADMITTED, Phase.LEAVING} for seat in self._seats.values()
        )
        if self._ceiling is not None and now_s >= self._ceiling.until_s and not makes_room:
            self._ceiling = None

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
            if seat.must_leave and not seat.active and seat.phase is Phase.RESIDENT:
                actions += self.dismiss(key, Why.LOST)
            if not seat.may_leave or seat.active or seat.waiters or seat.ttl_s <= 0:
                continue
            if now_s >= seat.used_s + seat.ttl_s:
                actions += self.dismiss(key, Why.IDLE)
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
            if seat.need_mib > self._limit() - self.charged_mib:
                return [], False
            seat.change(Change.START)
            seat.began_s = now_s
            return [Load(key)], True
        most_mib = self._budget() - sum(s.need_mib for k, s in self._seats.items() if k != key and s.stays)
        if seat.need_mib > most_mib:
            return [Refuse(key, seat.need_mib, int(most_mib))], True
        missing = seat.need_mib - self._room(besides=key) - self._leaving()
        if missing > could_free_mib(self._seats) and self._ceiling is not None:
            self._look_again(self._ceiling.until_s, now_s)
        victims = self._victims(missing, now_s)
        if victims is None or seat.is_asking:
            return [], seat.is_asking
        seat.asked_rank = seat.best.rank
        return [Ask(key, seat.best.rank, seat.best.operator)], True

    def _victims(self, missing_mib: float, now_s: float) -> tuple[Key, ...] | None:
        """Return who makes room now; None when it is not enough yet.

        Whose turn is over takes no new requests from now on, as far as its room is needed.
        """
        eviction = evict(self._seats, missing_mib, self._policy, now_s)
        self._closing.update(eviction.closing)
        for at_s in eviction.again_s:
            self._look_again(at_s, now_s)
        return eviction.leaving

    def _look_again(self, at_s: float, now_s: float) -> None:
        if at_s > now_s:
            self._again_s = min(self._again_s, at_s)

    def _budget(self) -> float:
        return math.inf if self._policy.budget_mib is None else self._policy.budget_mib

    def _limit(self) -> float:
        """Return what all models may take now, MiB."""
        return self._budget() if self._ceiling is None else min(self._budget(), self._ceiling.mib)

    def _room(self, *, besides: Key) -> float:
        """Return what is neither charged nor promised to another, MiB."""
        promised = sum(
            seat.need_mib
            for key, seat in self._seats.items()
            if key != besides and (seat.phase is Phase.ADMITTED or seat.is_asking)
        )
        return self._limit() - self.charged_mib - promised

    def _leaving(self) -> int:
        return sum(seat.need_mib for seat in self._seats.values() if seat.phase is Phase.LEAVING)
