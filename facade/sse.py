"""Server-sent events: a response that keeps its status for refusals as long as it can, and never ends a broken answer well."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from facade.errors import UNEXPECTED, error_response, late_error_object, note_if_caller_left
from facade.generation import Generation, watching
from facade.mailbox import Event
from facade.translate.stream import Stream
from omniserve.llm.v1 import llm_pb2
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


@dataclass(frozen=True, slots=True)
class Pace:
    """When a waiting stream speaks: its headers after `headers_after_s`, then a comment every `comment_every_s`."""

    headers_after_s: float
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


class StreamedAnswer(Response):
    """A response that streams a generation.

    Refusals before the first output have their own status. While the request waits, headers go out after
    `pace.headers_after_s`, if anything was heard of it at all, and comments follow. Later failures are an error event
    without `[DONE]`; when even that cannot be sent, the connection is cut. `before_end` runs before a good end is told.
    """

    def __init__(
        self,
        generation: Generation,
        stream: Stream,
        *,
        pace: Pace,
        owner: Owner,
        request_id: str,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(media_type="text/event-stream")  # only the name: we send everything ourselves
        self._generation = generation
        self._stream = stream
        self._pace = pace
        self._owner = owner
        self._request_id = request_id
        self._before_end = before_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer."""
        line = _Line(send)
        try:
            with self._generation, watching(self._owner, receive, self._generation):
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
            await line.write(self._stream.failed(told), last=True)
        else:
            await error_response(error, self._request_id, scope["path"])(scope, receive, send)

    async def _answer(self, line: _Line) -> None:
        events = await self._first_output(line)
        while True:
            body = self._encoded(events)
            if self._generation.finished:
                if self._before_end is not None:
                    await self._before_end()
                await line.write(body + self._stream.end(), last=True)
                return
            if body:
                await line.write(body)
            events = await self._generation.take()

    def _encoded(self, events: list[Event]) -> bytes:
        pieces = []
        for prompt, event in events:
            kind = event.WhichOneof("event")
            if kind == "output":
                pieces.append(self._stream.output(prompt, event.output))
            elif kind == "done":
                pieces.append(self._stream.done(prompt, event.done))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _first_output(self, line: _Line) -> list[Event]:
        """Return the first events that hold output; until then say that the request is alive, when it is."""
        speak_at = asyncio.get_running_loop().time() + self._pace.headers_after_s
        word = ""
        while True:
            events = await self._take_until(speak_at if word else None)
            for _, event in events:
                if event.HasField("output") or event.HasField("done"):
                    return events
                word = _word(event)
            now = asyncio.get_running_loop().time()
            if word and now >= speak_at:
                await line.write(f": {word}\n\n".encode())
                speak_at = now + self._pace.comment_every_s

    async def _take_until(self, moment: float | None) -> list[Event]:
        try:
            async with asyncio.timeout_at(moment):
                return await self._generation.take()
        except TimeoutError:
            return []


def _known(error: Exception) -> DomainError:
    if isinstance(error, DomainError):
        return error
    _log.error("unexpected error in a stream", exc_info=error)
    return DomainError(Reason.INTERNAL, UNEXPECTED)


def _word(event: llm_pb2.GenerationEvent) -> str:
    """Return what a waiting request waits for."""
    if event.HasField("queued"):
        return f"queued {event.queued.position}"
    if event.HasField("loading"):
        return f"loading {event.loading.progress:.2f}" if event.loading.HasField("progress") else "loading"
    return f"prefill {event.prefill.processed_tokens}/{event.prefill.prompt_tokens}"
