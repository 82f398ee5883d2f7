"""A host as the service sees it: jobs go in one at a time, pictures come out, and a host that dies is started again."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.diffusion.core.conditions import KeptPrompts
from services.diffusion.core.wire import (
    PROGRAM,
    Cancel,
    Failed,
    Forget,
    FromHost,
    Generate,
    ImageConfig,
    Made,
    Preview,
    Progress,
    Ready,
    Region,
    Upscale,
    UpscalerConfig,
)
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.board import Board
from services.kit.hosts.core.lifecycle import State
from services.kit.hosts.keeper import Ears, EngineLimits, Keeper, Report, Role

_ROLES: Final[Mapping[type, Role[Ready]]] = {
    ImageConfig: Role(PROGRAM, "image", FromHost, Ready),
    UpscalerConfig: Role(PROGRAM, "upscaler", FromHost, Ready),
}


@dataclass(frozen=True, slots=True)
class Pixels:
    """A picture: rows of 8-bit samples, top row first, no padding."""

    width: int
    height: int
    channels: int
    samples: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """What a job made. `recorded`: what the denoiser gave in the steps that were to be recorded."""

    made: Made
    pictures: tuple[Pixels, ...]
    recorded: bytes = b""


class Sink(Protocol):
    """Who is told what becomes of a job. Called in the event loop; must not block or raise."""

    def progress(self, progress: Progress) -> None:
        """Take a step."""

    def preview(self, preview: Preview, picture: Pixels) -> None:
        """Take a picture so far."""


@dataclass(slots=True)
class Counters:
    """What the hosts of a model have done since the service began. `waiting`: jobs that wait for their turn."""

    waiting: int = 0
    requests: int = 0
    images: int = 0
    steps: int = 0
    replayed: int = 0
    cancelled: int = 0
    inference_ms: int = 0


@dataclass(slots=True)
class _Work:
    job: int
    sink: Sink
    ended: "asyncio.Future[Made | Failed]"


class Slate:
    """Where the pictures that a job starts from are put down for the host."""

    def __init__(self, board: Board, job: int) -> None:
        self.board = board
        self.job = job

    def put(self, picture: Pixels | None) -> Region | None:
        """Put a picture down."""
        if picture is None:
            return None
        return Region(self.board.put(picture.samples), picture.width, picture.height, picture.channels)


class Engine:
    """Supervises the host of a model. `on_state` hears of every change of state."""

    def __init__(
        self,
        config: ImageConfig | UpscalerConfig,
        limits: EngineLimits,
        clock: Clock,
        *,
        environ: Mapping[str, str],
        cancel_s: float,
        on_state: Callable[[State], None],
    ) -> None:
        self.counters = Counters()
        self.prompts = KeptPrompts()
        self._inbox = Board.new("omniserve-to-host")
        self._outbox = Board.new("omniserve-from-host")
        self._cancel_s = cancel_s
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._work: _Work | None = None
        self._keeper: Keeper[Ready] = Keeper(
            _ROLES[type(config)],
            config,
            limits,
            clock,
            Ears(on_state, self._hear, self._bury, lambda: self._work is not None),
            environ=environ,
            descriptors=(self._inbox.descriptor, self._outbox.descriptor),
        )

    @property
    def report(self) -> Report[Ready]:
        """What is known about the host without asking it."""
        return self._keeper.report

    def forget_prompts(self) -> tuple[int, int]:
        """Have the host keep none of the encoded prompts; return entries and bytes that it had."""
        if not self._keeper.serving:
            return 0, 0
        self._keeper.send(Forget())
        return self.prompts.clear(self.report.pid)

    async def supervise(self) -> None:
        """Keep a host running until cancelled; when this is left, however, there is none any more."""
        try:
            await self._keeper.supervise()
        finally:
            self._inbox.clear()
            self._outbox.clear()

    async def run(self, job: Callable[[Slate], Generate | Upscale], sink: Sink) -> Result:
        """Have a job done. Raises DomainError `engine_failed`.

        Who is cancelled leaves only when the host is free again: at its next step, or because it was killed.
        """
        self.counters.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.counters.waiting -= 1
        try:
            return await self._run(job, sink)
        finally:
            self._work = None
            self._inbox.clear()
            self._outbox.clear()
            self._turn.release()

    async def _run(self, job: Callable[[Slate], Generate | Upscale], sink: Sink) -> Result:
        if not self._keeper.serving:
            raise _failed("the engine stopped before the request began")
        message = job(Slate(self._inbox, next(self._numbers)))
        work = _Work(message.job, sink, asyncio.get_running_loop().create_future())
        self._keeper.send(message)
        self._work = work
        self.counters.requests += 1
        try:
            # Awaiting it itself would end it together with whoever waits, and not with the host's work.
            await asyncio.wait({work.ended})
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            await self._end(work)
            raise
        outcome = work.ended.result()
        if isinstance(outcome, Failed) and outcome.field:
            raise DomainError(Reason.UNSUPPORTED, outcome.message, field=outcome.field)
        if isinstance(outcome, Failed):
            raise _failed(f"the engine made no picture: {outcome.message}")
        self._count(message, outcome)
        pictures = tuple(self._taken(region) for region in outcome.images)
        recorded = outcome.recorded
        data = b"" if recorded is None else self._outbox.take(recorded.offset, recorded.size)
        return Result(outcome, pictures, data)

    async def _end(self, work: _Work) -> None:
        """See to it that the host is free: at its next step if it can be told, else by its end.

        Whoever hurries is not heard: the device is not free before. A host that dies ends every wait, and so does a service
        that stops, since that ends the host.
        """
        host, ready = self._keeper.host, self.report.ready
        if host is None:
            return
        host.send(Cancel(work.job))
        now = asyncio.get_running_loop().time
        ends_s: float | None = now() + (self._cancel_s if ready is not None and ready.native else 0.0)
        while not work.ended.done():
            left_s = None if ends_s is None else max(0.0, ends_s - now())
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work.ended}, timeout=left_s)
            if ends_s is not None and now() >= ends_s:
                host.kill()
                ends_s = None
        work.ended.exception()  # nobody waits for it any more

    def _count(self, message: Generate | Upscale, made: Made) -> None:
        self.counters.images += len(made.images)
        self.counters.inference_ms += made.inference_ms
        if made.prompts is not None:
            self.prompts.learn(made.prompts, self.report.pid)
        if isinstance(message, Generate):
            replayed = message.replay.count if message.replay is not None else 0
            computed = made.denoise_calls
            self.counters.replayed += replayed
            self.counters.steps += message.count * message.sampling.steps if computed is None else computed

    def _taken(self, region: Region) -> Pixels:
        samples = self._outbox.take(region.offset, region.size)
        return Pixels(region.width, region.height, region.channels, samples)

    # ---- what the host says -----------------------------------------------------------------------------------

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - of the role's types
        work = self._work
        if work is None or work.job != message.job:
            return  # of a job that has ended for us
        if isinstance(message, Progress):
            work.sink.progress(message)
        elif isinstance(message, Preview):
            work.sink.preview(message, self._taken(message.image))
        elif not work.ended.done():
            work.ended.set_result(message)

    def _bury(self, why: str) -> None:
        """Let the job that a dead host was at fail."""
        work = self._work
        if work is not None and not work.ended.done():
            message = f"the engine failed while it worked on this request: {why}; it starts again"
            work.ended.set_exception(_failed(message))
            work.ended.exception()  # nobody may wait for it any more


def _failed(message: str) -> DomainError:
    return DomainError(Reason.ENGINE_FAILED, message)
