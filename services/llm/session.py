"""GenerateSession: many requests of the facade over one stream, one message per step for all of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from opentelemetry import context as trace_context
from opentelemetry.propagate import extract

from omniserve.llm.v1 import llm_pb2 as pb
from services.kit import telemetry
from services.kit.access import DEFAULT_TIER, TIERS
from services.kit.errors import DomainError, Reason, find_domain_error
from services.llm import translate
from services.llm.generate import Generator, Work
from services.llm.outbox import Outbox, Port

_log = telemetry.logger(__name__)

Write = Callable[[pb.GenerateSessionResponse], Awaitable[None]]


class Session:
    """One stream and its requests. When it ends, however it ends, its requests are cancelled."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._outbox = Outbox()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._draining = False

    async def serve(self, requests: AsyncIterator[pb.GenerateSessionRequest], write: Write) -> None:
        """Serve until the caller half-closes or `drain` and the last request have ended it."""
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(requests))
            while events := await self._outbox.take():
                tagged = [pb.GenerationEvent(request=s.request, **{s.kind: s.message}) for s in events]  # type: ignore[arg-type]
                await write(pb.GenerateSessionResponse(events=tagged))
            reader.cancel()

    def drain(self) -> None:
        """Let the stream end as soon as no request runs; new ones are refused by the generator."""
        self._draining = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._draining and not self._running:
            self._outbox.close()

    async def _read(self, requests: AsyncIterator[pb.GenerateSessionRequest]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                async for message in requests:
                    if message.HasField("cancel"):
                        self._cancel(message.cancel.request)
                    else:
                        self._start(message.start, tasks)
                for number in tuple(self._running):
                    self._cancel(number)
        finally:
            self._outbox.close()

    def _start(self, start: pb.StartGeneration, tasks: asyncio.TaskGroup) -> None:
        number = start.request
        if number in self._running:
            raise DomainError(Reason.INVALID_REQUEST, f"request {number} is running already", field="start.request")
        task = self._running[number] = tasks.create_task(self._run(start), name=f"request {number}")
        # Not in the task's own `finally`: a request that is cancelled before its first step never gets there.
        task.add_done_callback(lambda _: self._ended(number))

    def _ended(self, number: int) -> None:
        del self._running[number]
        self._close_if_idle()

    def _cancel(self, number: int) -> None:
        task = self._running.get(number)
        if task is not None:
            task.cancel()

    async def _run(self, start: pb.StartGeneration) -> None:
        port = Port(self._outbox, start.request)
        token = trace_context.attach(extract({"traceparent": start.traceparent}))
        try:
            await self._generator.run(_work(start), port)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the stream of all others
            found = find_domain_error(error)
            if found is None:
                _log.exception("unexpected error", request_id=start.request_id)
            port.failed(found or DomainError(Reason.INTERNAL, "an unexpected error; the log has it by the request id"))
        finally:
            trace_context.detach(token)


def _work(start: pb.StartGeneration) -> Work:
    kind = start.WhichOneof("kind")
    if kind is None:
        raise DomainError(Reason.INVALID_REQUEST, "'start.chat' or 'start.complete' must be given", field="start")
    tier = start.tier or DEFAULT_TIER
    if tier not in TIERS:
        message = f"'start.tier' is {tier[:40]!r}; {', '.join(TIERS)} are known"
        raise DomainError(Reason.INVALID_REQUEST, message, field="start.tier")
    request = start.chat if kind == "chat" else start.complete
    content = translate.chat(start.chat) if kind == "chat" else translate.completion(start.complete)
    client = start.client or "anonymous"
    return Work(request.model, content, translate.options(request.options), client, tier, start.request_id)
