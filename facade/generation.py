"""The generations of one HTTP request, and the caller who waits for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from starlette.types import Receive

from facade.mailbox import Mailbox
from facade.session import Event, LlmSession
from facade.translate.failures import Names, as_rest
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner


class Generation:
    """The prompts of one request, some at once, the others after them. Leaving the block cancels what still runs."""

    def __init__(
        self, session: LlmSession, messages: Sequence[llm_pb2.GenerateSessionRequest], *, at_once: int, names: Names
    ) -> None:
        self._session = session
        self._messages = messages
        self._at_once = at_once
        self._names = names
        self._mailbox: Mailbox[Event] = Mailbox()
        self._numbers: list[int] = []
        self._done = 0

    @property
    def finished(self) -> bool:
        """Whether every prompt has been answered."""
        return self._done == len(self._messages)

    async def take(self) -> list[Event]:
        """Wait for events and return all there are. Raises the DomainError that ended the request. Safe to cancel."""
        try:
            events = await self._mailbox.take()
        except DomainError as error:
            raise as_rest(error, self._names) from None
        for _, event in events:
            if event.HasField("done"):
                self._done += 1
                self._start_next()
        return events

    def abandon(self) -> None:
        """Say that the caller has gone."""
        self._mailbox.fail(DomainError(Reason.CANCELLED, "The caller has gone."))
        self._cancel()

    def _start_next(self) -> None:
        prompt = len(self._numbers)
        if prompt < len(self._messages):
            self._numbers.append(self._session.start(self._messages[prompt], self._mailbox, prompt))

    def _cancel(self) -> None:
        for number in self._numbers:
            self._session.cancel(number)

    def __enter__(self) -> Self:
        try:
            for _ in range(min(self._at_once, len(self._messages))):
                self._start_next()
        except DomainError:
            self._cancel()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()


class Abandonable(Protocol):
    """What runs only as long as somebody waits for it."""

    def abandon(self) -> None:
        """Say that the caller has gone."""


@contextmanager
def watching(owner: Owner, receive: Receive, generation: Abandonable) -> Iterator[None]:
    """Abandon the generation as soon as the caller hangs up during the block. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    watcher = owner.start(watch(), name="watch for the caller's hanging up")
    try:
        yield
    finally:
        watcher.cancel()
