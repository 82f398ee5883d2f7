"""Server-sent events: a response that keeps its status for refusals as long as it can, and never ends a broken answer well."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from facade.errors import UNEXPECTED, error_response, late_error_object, note_if_caller_left
from facade.generation import watching
from services.kit import telemetry
from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner

_log = telemetry.logger(__name__)

_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# How long the goodbye of a stream that is cut off by a shutdown may take.
_GOODBYE_S: Final = 0.5

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)


class Source(Protocol[E]):
    """An answer in the making. Entering the block begins it; leaving it cancels what still runs."""

    @property
    def finished(self) -> bool:
        """Whether all has been taken that the answer consists of."""

    async def take(self) -> list[E]:
        """Wait for events and return all there are. Raises the DomainError that ended the request. Safe to cancel."""

    def abandon(self) -> None:
        """Say that the caller has gone."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Teller(Protocol[E_contra]):
    """Turns events into the bytes of a stream."""

    def said(self, events: Sequence[E_contra]) -> bytes:
        """Return the bytes for what happened, none for what only a waiting caller wants to know.

        Raises DomainError engine_failed when the engine says it is done but something is missing.
        """

    def word(self, events: Sequence[E_contra]) -> str:
        """Return what a waiting request waits for, by the newest event that says it; "" for nothing new."""

    def end(self) -> bytes:
        """Return the bytes that end the answer."""

    def failed(self, told: Mapping[str, Any]) -> bytes:
        """Return the bytes that end an answer which broke; `told` is the error in OpenAI's shape."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When a waiting stream speaks: its headers after `headers_after_s`, then a comment every `comment_every_s`.

    `headers_after_s` None: not before its first output, since somebody else may serve it until then.
    """

    headers_after_s: float | None
    comment_every_s: float


class _Line:
    """The response as far as it has been sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.open = False

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send bytes, after the headers if they are still due."""
        if not self.open:
            self.open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


class StreamedAnswer(Response, Generic[E]):
    """A response that streams an answer while it is made.

    Refusals before the first output have their own status. While the request waits, headers go out after
    `pace.headers_after_s`, if anything was heard of it at all, and comments follow; those of a request that somebody else may
    serve wait for its first output. Later failures are an error event
    without `[DONE]`; when even that cannot be sent, the connection is cut. `before_end` runs before a good end is told.
    """

    def __init__(
        self,
        source: Source[E],
        teller: Teller[E],
        *,
        pace: Pace,
        owner: Owner,
        request_id: str,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(media_type="text/event-stream")  # only the name: we send everything ourselves
        self._source = source
        self._teller = teller
        self._pace = pace
        self._owner = owner
        self._request_id = request_id
        self._before_end = before_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer."""
        line = _Line(send)
        try:
            with self._source, watching(self._owner, receive, self._source):
                await self._answer(line)
        except asyncio.CancelledError:
            # The server has run out of patience with its last streams.
            with suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    draining = DomainError(Reason.DRAINING, "The facade is shutting down.")
                    await self._fail(draining, line, scope, receive, send)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream must not end well
            await self._fail(_known(error), line, scope, receive, send)

    async def _fail(self, error: DomainError, line: _Line, scope: Scope, receive: Receive, send: Send) -> None:
        note_if_caller_left(error)
        if line.open:
            told = late_error_object(error, self._request_id)
            await line.write(self._teller.failed(told), last=True)
        else:
            may_leave = self._pace.headers_after_s is None
            answer = error_response(error, self._request_id, scope["path"], may_leave=may_leave)
            await answer(scope, receive, send)

    async def _answer(self, line: _Line) -> None:
        body = await self._first_output(line)
        while not self._source.finished:
            if body:
                await line.write(body)
            body = self._teller.said(await self._source.take())
        if self._before_end is not None:
            await self._before_end()
        await line.write(body + self._teller.end(), last=True)

    async def _first_output(self, line: _Line) -> bytes:
        """Return the first output; until then say that the request is alive, when it is."""
        after_s, word = self._pace.headers_after_s, ""
        speak_at = None if after_s is None else asyncio.get_running_loop().time() + after_s
        while True:
            events = await self._take_until(speak_at if word else None)
            body = self._teller.said(events)
            if body or self._source.finished:
                return body
            word = self._teller.word(events) or word
            now = asyncio.get_running_loop().time()
            if word and speak_at is not None and now >= speak_at:
                await line.write(f": {word}\n\n".encode())
                speak_at = now + self._pace.comment_every_s

    async def _take_until(self, moment: float | None) -> list[E]:
        try:
            async with asyncio.timeout_at(moment):
                return await self._source.take()
        except TimeoutError:
            return []


def _known(error: Exception) -> DomainError:
    if isinstance(error, DomainError):
        return error
    _log.error("unexpected error in a stream", exc_info=error)
    return DomainError(Reason.INTERNAL, UNEXPECTED)
