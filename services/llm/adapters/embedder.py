"""An embedding host as the service sees it: inputs go in, vectors come out, and a host that dies is started again."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.keeper import Ears, EngineLimits, Keeper, Report, Role
from services.llm.core.embed_wire import (
    Ask,
    Computed,
    Drop,
    EmbedConfig,
    EmbedCounters,
    EmbedReady,
    FromEmbedder,
    Item,
    Prepare,
    Prepared,
    Start,
    Unfit,
)
from services.llm.core.embedding import Vectors, floats
from services.llm.core.wire import PROGRAM

ROLE: Final = Role(PROGRAM, "embed", FromEmbedder, EmbedReady)
_FLOAT_BYTES: Final = 4
_TOTALS: Final = ("steps", "tokens", "inputs", "requests", "cancelled", "compute_us")


class UnfitInputError(Exception):
    """An input that cannot be computed, by its place. `tokens`: how many it has, of at most `limit`."""

    def __init__(self, unfit: Unfit) -> None:
        super().__init__(f"input {unfit.place} has {unfit.tokens} tokens of at most {unfit.limit}")
        self.place = unfit.place
        self.tokens = unfit.tokens
        self.limit = unfit.limit


@dataclass(slots=True)
class _Request:
    """A request that the host knows. `prepared`: its tokens; `ended`: all its vectors are there.

    `started`: the host may compute it. `lost`: the host died before that, and the next one knows nothing of it.
    """

    message: Prepare
    width: int
    prepared: asyncio.Future[int]
    ended: asyncio.Future[None]
    parts: list[bytes] = field(default_factory=list)
    missing_bytes: int = 0
    started: bool = False
    lost: bool = False


class Embedder:
    """Supervises one embedding host. `on_state` hears of every change of state."""

    def __init__(
        self,
        config: EmbedConfig,
        limits: EngineLimits,
        clock: Clock,
        *,
        environ: Mapping[str, str],
        on_state: Callable[[State], None],
    ) -> None:
        ears = Ears(on_state, self._hear, self._bury, self._work)
        self._keeper: Keeper[EmbedReady] = Keeper(ROLE, config, limits, clock, ears, environ=environ)
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._answered = asyncio.Event()
        self._now = EmbedCounters()
        self._past = EmbedCounters()

    def _work(self) -> int:
        return sum(request.started for request in self._requests.values())

    @property
    def report(self) -> Report[EmbedReady]:
        """What is known about the host without asking it."""
        return self._keeper.report

    async def supervise(self) -> None:
        """Keep a host running until cancelled. Raises EngineUnusableError when trying again is pointless."""
        await self._keeper.supervise()

    async def ready(self, *, wait_s: float) -> EmbedReady:
        """Wait until the host serves. Raises DomainError `loading` after `wait_s`."""
        return await self._keeper.ready(wait_s=wait_s)

    @asynccontextmanager
    async def prepare(self, items: Sequence[Item], *, truncate: bool) -> AsyncIterator["Batch"]:
        """Have the inputs tokenized and kept for the length of the block; leaving it early ends what is being computed.

        Raises UnfitInputError for the first input that is empty or too long, DomainError `engine_failed` when the host dies.
        """
        loop = asyncio.get_running_loop()
        message = Prepare(next(self._numbers), list(items), truncate)
        request = _Request(message, 0, loop.create_future(), loop.create_future())
        try:
            yield Batch(self, request, await self._prepare(request))
        finally:
            if self._requests.pop(message.request, None) is not None:
                self._keeper.send(Drop(message.request))

    async def _prepare(self, request: _Request) -> int:
        ready = self._keeper.report.ready
        if not self._keeper.serving or ready is None:
            raise _failed("the engine stopped before the request began")
        request.width = ready.width
        request.missing_bytes = len(request.message.items) * ready.width * _FLOAT_BYTES
        self._keeper.send(request.message)
        self._requests[request.message.request] = request
        return await request.prepared

    async def compute(self, request: _Request, *, wait_s: float) -> Vectors:
        """Compute what was prepared; see Batch."""
        if request.lost:
            await self._keeper.ready(wait_s=wait_s)
            request.lost, request.prepared = False, asyncio.get_running_loop().create_future()
            await self._prepare(request)
        self._keeper.send(Start(request.message.request))
        request.started = True
        await request.ended
        return floats(b"".join(request.parts), request.width)

    async def counters(self, *, wait_s: float) -> EmbedCounters:
        """Return the totals over all hosts and the state of the present one; the last known when it does not answer."""
        if self._keeper.serving:
            answered = self._answered
            self._keeper.send(Ask())
            try:
                async with asyncio.timeout(wait_s):
                    await answered.wait()
            except TimeoutError:
                pass
        return _sum(self._past, self._now)

    def _hear(self, message: Prepared | Unfit | Computed) -> None:
        if isinstance(message, Computed):
            self._computed(message)
            return
        request = self._requests.get(message.request)
        if request is None or request.prepared.done():
            return  # left, while this was on its way
        if isinstance(message, Unfit):
            del self._requests[message.request]
            request.prepared.set_exception(UnfitInputError(message))
        else:
            request.prepared.set_result(message.tokens)

    def _computed(self, message: Computed) -> None:
        self._now = message.counters
        self._answered.set()
        self._answered = asyncio.Event()
        for part in message.parts:
            request = self._requests.get(part.request)
            if request is None or request.ended.done():
                continue  # left, while this was on its way
            request.parts.append(part.vectors)
            request.missing_bytes -= len(part.vectors)
            if request.missing_bytes == 0:
                del self._requests[part.request]
                request.ended.set_result(None)

    def _bury(self, why: str) -> None:
        self._past, self._now = _sum(self._past, self._now), EmbedCounters()
        requests, self._requests = self._requests, {}
        error = _failed(f"the engine failed while it worked on this request: {why}; it starts again")
        for request in requests.values():
            request.lost = request.prepared.done() and not request.started
            waited_for = request.ended if request.started else request.prepared
            if not waited_for.done():
                waited_for.set_exception(error)


class Batch:
    """The inputs of one request, tokenized in the host. `tokens`: of all of them together."""

    def __init__(self, embedder: Embedder, request: _Request, tokens: int) -> None:
        self._embedder = embedder
        self._request = request
        self.tokens = tokens

    async def compute(self, *, wait_s: float) -> Vectors:
        """Return the vectors in the order of the inputs.

        A host that died since is waited for. Raises DomainError `loading` after `wait_s` of that, and `engine_failed` when
        the host dies while it computes.
        """
        return await self._embedder.compute(self._request, wait_s=wait_s)


def _failed(message: str) -> DomainError:
    return DomainError(Reason.ENGINE_FAILED, message)


def _sum(past: EmbedCounters, now: EmbedCounters) -> EmbedCounters:
    return msgspec.structs.replace(now, **{name: getattr(past, name) + getattr(now, name) for name in _TOTALS})
