"""What a running request has to say, collected until the stream's writer takes it."""

import asyncio
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

_REPLACED: Final = frozenset({"queued", "loading", "step"})


@dataclass(frozen=True, slots=True)
class Said:
    """One event: the name of its field in the contract's oneof, the message, and of which part of the work it tells."""

    kind: str
    message: Message
    part: object = None


class Outbox:
    """Events in order. To a slow reader the newest of several signs of progress in one part is said, never a growing queue.

    `untold`: kinds that nobody wants to hear of.
    """

    def __init__(self, untold: frozenset[str] = frozenset()) -> None:
        self._untold = untold
        self._events: list[Said] = []
        self._news = asyncio.Event()
        self._closed = False

    def put(self, kind: str, message: Message, *, part: object = None) -> None:
        """Add an event; of a part of the work, if there are several whose ends are worth telling."""
        if kind in self._untold:
            return
        last = self._events[-1] if self._events else None
        if last is not None and kind in _REPLACED and (last.kind, last.part) == (kind, part):
            self._events.pop()
        self._events.append(Said(kind, message, part))
        self._news.set()

    def close(self) -> None:
        """Say that nothing more will come."""
        self._closed = True
        self._news.set()

    async def take(self) -> list[Said]:
        """Wait for events and return them all; empty when the box is closed and empty."""
        while not self._events and not self._closed:
            await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        return events
