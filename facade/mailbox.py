"""Where one HTTP request waits for what an engine says about it."""

import asyncio
from typing import Generic, TypeVar

from services.kit.errors import DomainError

E = TypeVar("E")


class Mailbox(Generic[E]):
    """Events in order, then at most one error. One task takes; putting never waits."""

    def __init__(self) -> None:
        self._events: list[E] = []
        self._error: DomainError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: E) -> None:
        """Add an event."""
        self._events.append(event)
        self._wake()

    def fail(self, error: DomainError) -> None:
        """End the events with an error; only the first counts."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[E]:
        """Wait for events and return all there are; raises the DomainError once they are taken. Safe to cancel."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events
