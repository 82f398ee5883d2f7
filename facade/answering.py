"""How a request for text is answered, whole or streamed: the one way from a translated call to llm and back."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from facade.door import Principal, principal_of
from facade.generation import Generation, watching
from facade.session import Event
from facade.sse import Pace, StreamedAnswer
from facade.translate.answers import Head
from facade.translate.chat import Call
from facade.translate.stream import Stream
from facade.wiring import Facade
from omniserve.llm.v1 import llm_pb2


class Collector(Protocol):
    """What takes the events of an answer that is not streamed. `prompt` is a prompt's place in the request."""

    def output(self, prompt: int, output: llm_pb2.Output) -> None:
        """Take what a prompt's choices gained."""

    def done(self, prompt: int, done: llm_pb2.Done) -> None:
        """Take the end of a prompt. Raises DomainError engine_failed when one of its choices has no end."""


class Answering:
    """Answers calls on behalf of callers."""

    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._pace = Pace(facade.settings.headers_after_s, facade.settings.comment_every_s)

    async def head(self, call: Call, principal: Principal, prefix: str) -> Head:
        """Return what the answer's objects begin with; the id is the request's, after a prefix."""
        model = await self._facade.llm.name_of(call.model, principal)
        return Head(prefix + principal.request_id, int(self._facade.clock.wall()), model, call.choices)

    def streamed(
        self, call: Call, principal: Principal, stream: Stream, before_end: Callable[[], Awaitable[None]] | None = None
    ) -> Response:
        """Return a response that streams the answer. `before_end`: what must have happened when the end is told."""
        generation = self._generation(call, principal)
        return StreamedAnswer(
            generation,
            _TextTeller(stream),
            pace=self._pace,
            owner=self._facade.owner,
            request_id=principal.request_id,
            before_end=before_end,
        )

    async def collect(self, request: Request, call: Call, collector: Collector) -> None:
        """Give every event of the answer to the collector. Raises the DomainError that ended the generation."""
        waiting = self._generation(call, principal_of(request.scope))
        with waiting as generation, watching(self._facade.owner, request.receive, generation):
            while not generation.finished:
                for prompt, event in await generation.take():
                    if event.HasField("output"):
                        collector.output(prompt, event.output)
                    elif event.HasField("done"):
                        collector.done(prompt, event.done)

    def _generation(self, call: Call, principal: Principal) -> Generation:
        messages = [_start(each, principal) for each in call.requests]
        at_once = self._facade.settings.prompts_at_once
        return Generation(self._facade.session, messages, at_once=at_once, names=call.names)


class _TextTeller:
    """Tells the events of generations by the stream of their API."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def said(self, events: Sequence[Event]) -> bytes:
        pieces = []
        for prompt, event in events:
            kind = event.WhichOneof("event")
            if kind == "output":
                pieces.append(self._stream.output(prompt, event.output))
            elif kind == "done":
                pieces.append(self._stream.done(prompt, event.done))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @staticmethod
    def word(events: Sequence[Event]) -> str:
        return _word(events[-1][1]) if events else ""

    def end(self) -> bytes:
        return self._stream.end()

    def failed(self, told: Mapping[str, Any]) -> bytes:
        return self._stream.failed(told)


def _word(event: llm_pb2.GenerationEvent) -> str:
    """Return what a waiting request waits for."""
    if event.HasField("queued"):
        return f"queued {event.queued.position}"
    if event.HasField("loading"):
        return f"loading {event.loading.progress:.2f}" if event.loading.HasField("progress") else "loading"
    if event.HasField("prefill"):
        return f"prefill {event.prefill.processed_tokens}/{event.prefill.prompt_tokens}"
    return ""


def _start(
    request: llm_pb2.ChatRequest | llm_pb2.CompleteRequest, principal: Principal
) -> llm_pb2.GenerateSessionRequest:
    message = llm_pb2.GenerateSessionRequest()
    start = message.start
    if isinstance(request, llm_pb2.ChatRequest):
        start.chat.CopyFrom(request)
    else:
        start.complete.CopyFrom(request)
    start.client, start.tier = principal.client, principal.tier
    start.request_id, start.traceparent = principal.request_id, principal.traceparent
    return message
