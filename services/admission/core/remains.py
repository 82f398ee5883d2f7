"""What HTTP exchanges of before a restart still use: known by their upstream alone, from Envoy's gauges. Pure.

Admission forgets its permits when it ends, but the exchanges behind the gate go on. Their number per upstream is in Envoy's
gauges; what one of them costs is what routes have asked for there, and the most of it where they differ.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from services.admission.core.model import Ask, Modality, Tier

READINGS: Final = 5
"""So many readings of the gauges in a row must agree that an old exchange is over, where new ones are among them."""


class Use(NamedTuple):
    """What an exchange at an upstream takes of a pool, at the most."""

    upstream: str
    pool: str
    modality: Modality
    units: int


class Uses:
    """The most that an exchange takes, by upstream and pool."""

    def __init__(self, known: Iterable[Use] = ()) -> None:
        self._by_place: dict[tuple[str, str], Use] = {}
        for use in known:
            self.note(use)

    def note(self, use: Use) -> bool:
        """Take note of what a route asks for; return whether it is more than was known."""
        known = self._by_place.get((use.upstream, use.pool))
        if use.units <= (known.units if known else 0):
            return False
        self._by_place[use.upstream, use.pool] = use
        return True

    def all(self) -> tuple[Use, ...]:
        """Return all of them, as a restart must know them."""
        return tuple(self._by_place.values())

    def of(self, upstream: str) -> list[Use]:
        """Return what an exchange there takes; of an upstream that nobody knows, the most that any takes of each pool."""
        found = [use for use in self._by_place.values() if use.upstream == upstream]
        if found:
            return found
        most: dict[str, Use] = {}
        for use in self._by_place.values():
            if use.units > (most[use.pool].units if use.pool in most else 0):
                most[use.pool] = use
        return list(most.values())


class Change(NamedTuple):
    """Permits to count from now on, and tickets of those that are over."""

    begun: list[tuple[int, Ask]]
    ended: list[int]


class Remains:
    """Exchanges of the past that are counted, each with a ticket per pool."""

    def __init__(self, uses: Iterable[Use]) -> None:
        self.uses = Uses(uses)
        self._exchanges: dict[str, list[list[int]]] = {}

    def __bool__(self) -> bool:
        return any(self._exchanges.values())

    def match(self, running: Mapping[str, int], tickets: Iterator[int]) -> Change:
        """Make it as many as run: exchanges by upstream; one that is not mentioned has none."""
        change = Change([], [])
        for upstream in running.keys() | self._exchanges.keys():
            counted = self._exchanges.setdefault(upstream, [])
            while len(counted) < running.get(upstream, 0):
                exchange = [(next(tickets), _ask(use)) for use in self.uses.of(upstream)]
                counted.append([ticket for ticket, _ in exchange])
                change.begun.extend(exchange)
            while len(counted) > running.get(upstream, 0):
                change.ended.extend(counted.pop())
        return change


def _ask(use: Use) -> Ask:
    """Return the ask of an exchange of which nothing else is known; it runs already, so its rank changes nothing."""
    return Ask(use.pool, use.modality, Tier.FREE, use.units, 0.0)


class Running(NamedTuple):
    """Exchanges behind the gate by side (`e0`, `e1`) and upstream, as Envoy counts them."""

    e0: Mapping[str, int]
    e1: Mapping[str, int]

    def at(self, side: str) -> Mapping[str, int]:
        """Return those of one side."""
        return self.e0 if side == "e0" else self.e1


def own_side(epoch: int) -> str:
    """Return the side of an epoch: neighbours in time differ."""
    return f"e{epoch & 1}"


def other_side(side: str) -> str:
    """Return the other one."""
    return "e0" if side == "e1" else "e1"


def choose_side(epoch: int, running: Running) -> str:
    """Return the side to let requests in to: the epoch's, unless only the other one is free of the past."""
    own = own_side(epoch)
    taken = any(running.at(own).values())
    return other_side(own) if taken and not any(running.at(other_side(own)).values()) else own


class OwnSide:
    """What remains of the past on the side where new exchanges are let in too, after two restarts within one's life.

    Of what Envoy counts there, the exchanges that we know all the while are new. One that was let in a moment ago is known
    before Envoy counts it, so only what several readings agree on is believed; and the number never rises.
    """

    def __init__(self, left: Mapping[str, int]) -> None:
        self.left = dict(left)
        self._seen: deque[Mapping[str, int]] = deque(maxlen=READINGS)

    def read(self, running: Mapping[str, int], new: Mapping[str, int]) -> None:
        """Take a reading of the side, and how many of its exchanges are new."""
        self._seen.append({name: running.get(name, 0) - new.get(name, 0) for name in self.left})
        for name, left in self.left.items():
            most = running.get(name, 0)
            if len(self._seen) == READINGS:
                most = min(most, max(0, *(each[name] for each in self._seen)))
            self.left[name] = min(left, most)


def past(running: Running, side: str, left_on_own: Mapping[str, int]) -> dict[str, int]:
    """Return what remains of the past by upstream: all of the other side, and what is left on the own one (OwnSide)."""
    found = dict(running.at(other_side(side)))
    for upstream, left in left_on_own.items():
        found[upstream] = found.get(upstream, 0) + min(left, running.at(side).get(upstream, 0))
    return {upstream: count for upstream, count in found.items() if count}
