"""The one stream to llm that carries the generations of every HTTP request."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from facade.mailbox import Mailbox
from facade.translate.failures import error_of
from omniserve.llm.v1 import llm_pb2
from services.kit import telemetry
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.wire.dial import LongCall

_log = telemetry.logger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0
# The stream is everybody's: a message that llm would refuse as too large must not end it. llm takes 96 MiB.
_LARGEST_START = 94 * 1024 * 1024

_BEFORE_IT_BEGINS = frozenset({"queued", "loading"})

Event = tuple[int, llm_pb2.GenerationEvent]
"""A prompt's place in the request, and what happened."""

_Outgoing = asyncio.Queue[llm_pb2.GenerateSessionRequest]

METHOD: Final = "/omniserve.llm.v1.LlmService/GenerateSession"
Dial = Callable[[Callable[[bytes], None]], AbstractAsyncContextManager[LongCall]]
"""Opens the stream, `METHOD`, given who hears its messages. Raises OSError when nobody is there."""


@dataclass(slots=True)
class _Running:
    """One generation: who listens, which of its prompts this is, and until it is sent what to send.

    `message`: what was sent, until llm has begun it.
    """

    mailbox: Mailbox[Event]
    prompt: int
    message: llm_pb2.GenerateSessionRequest | None
    unsent: llm_pb2.GenerateSessionRequest | None = None
    patience: asyncio.TimerHandle | None = None

    def stop_waiting(self) -> None:
        self.unsent = None
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None


class LlmSession:
    """Starts and cancels generations on one GenerateSession stream, and hands their events to mailboxes.

    `run` keeps the stream open, reconnecting with back-off. Generations that run when it breaks end with an error;
    those that begin meanwhile wait for the next stream at most `wait_s`, and so do those that a stopping llm has not begun.
    """

    def __init__(self, dial: Dial, *, wait_s: float) -> None:
        self._dial = dial
        self._has_heard = False
        self._wait_s = wait_s
        self._running: dict[int, _Running] = {}
        self._last_number = 0
        self._outgoing: _Outgoing | None = None
        self._closing: DomainError | None = None

    @property
    def connected(self) -> bool:
        """Whether a stream is open."""
        return self._outgoing is not None

    @property
    def running(self) -> int:
        """How many generations run or wait for a stream."""
        return len(self._running)

    def start(self, message: llm_pb2.GenerateSessionRequest, mailbox: Mailbox[Event], prompt: int) -> int:
        """Begin a generation and return its number; what happens goes to the mailbox. Sets `message.start.request`.

        Raises DomainError too_large for a message that llm would not take.
        """
        if message.ByteSize() > _LARGEST_START:
            raise DomainError(
                Reason.TOO_LARGE, f"The request has {message.ByteSize()} bytes for llm; the most is {_LARGEST_START}."
            )
        self._last_number += 1
        number = message.start.request = self._last_number
        self._running[number] = _Running(mailbox, prompt, message)
        if self._closing is not None:
            self._end(number, self._closing)
        elif self._outgoing is not None:
            self._outgoing.put_nowait(message)
        else:
            self._keep(number, message)
        return number

    def _keep(self, number: int, message: llm_pb2.GenerateSessionRequest) -> None:
        """Keep a generation for the next stream, for a while."""
        running = self._running[number]
        running.unsent = message
        running.patience = asyncio.get_running_loop().call_later(self._wait_s, self._give_up, number)

    def _give_up(self, number: int) -> None:
        self._end(number, DomainError(Reason.LOADING, f"llm cannot be reached; waited {self._wait_s:g} s for it."))

    def _end(self, number: int, error: DomainError) -> None:
        running = self._running.pop(number)
        running.stop_waiting()
        running.mailbox.fail(error)

    def cancel(self, number: int) -> None:
        """End a generation at once; nothing more is heard of it. No effect on one that has ended."""
        running = self._running.pop(number, None)
        if running is None:
            return
        sent = running.unsent is None
        running.stop_waiting()
        if sent and self._outgoing is not None:
            cancel = llm_pb2.CancelGeneration(request=number)
            self._outgoing.put_nowait(llm_pb2.GenerateSessionRequest(cancel=cancel))

    def close(self, error: DomainError) -> None:
        """End every generation with an error, and each that begins from now on."""
        self._closing = error
        for number in tuple(self._running):
            running = self._running[number]
            mailbox, sent = running.mailbox, running.unsent is None
            if sent:
                self.cancel(number)
                mailbox.fail(error)
            else:
                self._end(number, error)

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        backoff = _FIRST_BACKOFF_S
        while True:
            self._has_heard = False
            try:
                error = await self._serve_one_stream()
            except OSError:
                pass  # nobody there yet; generations that wait have their own patience
            else:
                _log.warning("the stream to llm ended", reason=error.reason.value, why=error.message)
            backoff = _FIRST_BACKOFF_S if self._has_heard else min(backoff * 2, _LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff)

    async def _serve_one_stream(self) -> DomainError:
        """Return what ended the stream. Raises OSError when there is nobody to open it to."""
        outgoing: _Outgoing = asyncio.Queue()
        async with self._dial(self._hear) as call, asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(_write(call, outgoing), name="writer of the stream to llm")
            self._open(outgoing)
            try:
                ended = await call.end()
            finally:
                self._outgoing = None
                writer.cancel()
        error = DomainError(Reason.DRAINING, "llm is shutting down") if ended is None else from_rpc_error(ended)
        self._lose(is_stopping=error.reason is Reason.DRAINING)
        return error

    def _open(self, outgoing: _Outgoing) -> None:
        self._outgoing = outgoing
        for running in self._running.values():
            if running.unsent is not None:
                outgoing.put_nowait(running.unsent)
                running.stop_waiting()

    def _hear(self, message: bytes) -> None:
        self._has_heard = True
        for event in llm_pb2.GenerateSessionResponse.FromString(message).events:
            self._deliver(event)

    def _deliver(self, event: llm_pb2.GenerationEvent) -> None:
        number = event.request
        running = self._running.get(number)
        if running is None:
            return  # cancelled meanwhile
        kind = event.WhichOneof("event")
        if kind == "failed":
            error = error_of(event.failed)
            if error.reason is Reason.DRAINING and running.message is not None:
                self._keep(number, running.message)  # llm stops and has not begun it: the next one will
            else:
                self._end(number, error)
            return
        if kind not in _BEFORE_IT_BEGINS:
            running.message = None
        if kind == "done":
            del self._running[number]
        running.mailbox.put((running.prompt, event))

    def _lose(self, *, is_stopping: bool) -> None:
        """End what ran on the stream that broke: whether llm had finished it cannot be known any more.

        `is_stopping`: llm said goodbye; what it has not begun is for the next one.
        """
        lost = DomainError(Reason.UPSTREAM_FAILED, "llm went away while it worked on this request.")
        for number, running in tuple(self._running.items()):
            if running.unsent is not None:
                continue
            if is_stopping and running.message is not None:
                self._keep(number, running.message)
            else:
                self._end(number, lost)


async def _write(call: LongCall, outgoing: _Outgoing) -> None:
    """Send messages one after the other, for ever."""
    while True:
        await call.say((await outgoing.get()).SerializeToString())
