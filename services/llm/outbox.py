"""What running requests have to say, collected until the stream's writer takes it: one message per step for all of them."""

import asyncio
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from omniserve.llm.v1 import llm_pb2 as pb
from services.kit.errors import DomainError
from services.llm import translate
from services.llm.core.wire import Delta, Progress


@dataclass(frozen=True, slots=True)
class Said:
    """One event of one request: the name of its field in the contract's oneof, and the message."""

    request: int
    kind: str
    message: Message


class Outbox:
    """Events of several requests, in order.

    Outputs that the writer has not taken yet are merged: a slow reader gets fewer and longer ones, never a growing queue.
    """

    def __init__(self) -> None:
        self._events: list[tuple[int, str, Any]] = []
        self._outputs: dict[int, list[Delta]] = {}
        self._news = asyncio.Event()
        self._closed = False

    def put(self, request: int, kind: str, message: Message) -> None:
        """Add an event."""
        self._outputs.pop(request, None)
        self._events.append((request, kind, message))
        self._news.set()

    def put_delta(self, request: int, delta: Delta) -> None:
        """Add what a choice gained."""
        deltas = self._outputs.get(request)
        if deltas is None:
            deltas = self._outputs[request] = []
            self._events.append((request, "output", deltas))
        deltas.append(delta)
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
        self._outputs.clear()
        return [
            Said(request, kind, translate.output(content) if kind == "output" else content)
            for request, kind, content in events
        ]


class Port:
    """One request's way into an outbox; the engine's sink. `model`: the name of the one that answers."""

    def __init__(self, outbox: Outbox, request: int, model: str = "") -> None:
        self._outbox = outbox
        self._request = request
        self.model = model

    def queued(self, position: int, eta_ms: int | None) -> None:
        """Say that the request waits for its permit."""
        self._outbox.put(self._request, "queued", pb.Queued(position=position, eta_ms=eta_ms))

    def loading(self, progress: float | None) -> None:
        """Say that the model is being loaded."""
        self._outbox.put(self._request, "loading", pb.Loading(model=self.model, progress=progress))

    def progress(self, progress: Progress) -> None:
        """Say how much of the prompt is processed."""
        message = pb.Prefill(processed_tokens=progress.processed, prompt_tokens=progress.total)
        self._outbox.put(self._request, "prefill", message)

    def delta(self, delta: Delta) -> None:
        """Say what a choice gained."""
        self._outbox.put_delta(self._request, delta)

    def done(self, usage: pb.Usage) -> None:
        """Say that the request has ended well."""
        self._outbox.put(self._request, "done", pb.Done(usage=usage, model=self.model))

    def failed(self, error: DomainError) -> None:
        """Say that the request has ended with an error; for sessions only."""
        self._outbox.put(self._request, "failed", translate.failed(error))
