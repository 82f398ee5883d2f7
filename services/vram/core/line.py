"""Who waits for room: better tiers first, then in order of arrival; who waits is overtaken on none of the devices it wants."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.vram.core.model import Ask, Tier


@dataclass(frozen=True, slots=True)
class Waiting:
    """An ask in the line. `arrived`: the ledger's mark when it came; `ticket`: grows with every arrival."""

    ticket: int
    ask: Ask
    arrived: int


class Line:
    """The asks that wait."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, ask: Ask, arrived: int) -> Waiting:
        """Add an ask at the end of its tier."""
        waiting = Waiting(next(self._tickets), ask, arrived)
        self._waiting[waiting.ticket] = waiting
        return waiting

    def leave(self, ticket: int) -> None:
        """Take an ask out; no effect when it has gone."""
        self._waiting.pop(ticket, None)

    def closed_to(self, tier: Tier, devices: Iterable[str]) -> dict[str, str]:
        """Return the devices that somebody of this tier or a better one waits for, with the sentence for the refused."""
        closed: dict[str, str] = {}
        for waiting in self.ordered() if self._waiting else ():
            if waiting.ask.tier < tier:
                break
            _close(closed, waiting.ask, devices)
        return closed

    def serve(self, devices: Iterable[str], attempt: Callable[[Waiting, dict[str, str]], bool]) -> None:
        """Let each in turn attempt to get its room, and leave; whoever fails closes its devices to all behind it."""
        devices = tuple(devices)
        closed: dict[str, str] = {}
        for waiting in self.ordered():
            if attempt(waiting, closed):
                self.leave(waiting.ticket)
            else:
                _close(closed, waiting.ask, devices)

    def ordered(self) -> list[Waiting]:
        """Return who waits, next one first."""
        return sorted(self._waiting.values(), key=lambda each: (-each.ask.tier, each.ticket))


def _close(closed: dict[str, str], ask: Ask, devices: Iterable[str]) -> None:
    named = [wanted.device for wanted in ask.items]
    for device in devices if "" in named else named:
        closed.setdefault(
            device, f"{ask.tenant} (tier {ask.tier.name.lower()}) came first and waits for room on {device}."
        )
