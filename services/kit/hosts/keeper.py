"""Keeps one host process running: started, watched, started again when it dies; and tells who asks how it is."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from services.kit import telemetry
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.lifecycle import BackOff, Event, State, after, is_stuck
from services.kit.hosts.core.messages import LoadFailed, Loading
from services.kit.hosts.process import HostProcess

_WATCH_S: Final = 1.0
_log = telemetry.logger(__name__)
R = TypeVar("R")


class EngineUnusableError(Exception):
    """The engine can never start with these settings; the message says why."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`load_s`: how long a load may stay silent; `stuck_s`: how long a step may take, 0 for ever.

    `loads`: how many times in a row a load may die before it is given up, None for ever. One that the engine
    refuses is given up at once then.
    """

    load_s: float = 600.0
    stuck_s: float = 120.0
    loads: int | None = None
    back_off: BackOff = field(default_factory=BackOff)


@dataclass(frozen=True, slots=True)
class Role(Generic[R]):
    """What kind of host it is: its program and name on the command line, the type of its messages, and of the one that says ready."""

    program: str
    name: str
    messages: Any
    ready: type[R]


@dataclass(frozen=True, slots=True)
class Ears:
    """Who is told. `state`: of every change; `message`: what the host says while it serves; `death`: why it died.

    `work`: asked for the number of requests the host is at; one that has work must not be silent.
    """

    state: Callable[[State], None]
    message: Callable[[Any], None]
    death: Callable[[str], None]
    work: Callable[[], int]


@dataclass(slots=True)
class Report(Generic[R]):
    """What is known about the host without asking it."""

    state: State = State.AVAILABLE
    pid: int | None = None
    ready: R | None = None
    progress: float | None = None
    failure: str | None = None
    crashes: int = 0
    stuck: bool = False


class Keeper(Generic[R]):
    """Supervises one host. `config` is its first message; `descriptors`: open files that it inherits."""

    def __init__(
        self,
        role: Role[R],
        config: msgspec.Struct,
        limits: EngineLimits,
        clock: Clock,
        ears: Ears,
        *,
        environ: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        self.report: Report[R] = Report()
        self._role = role
        self._config = config
        self._limits = limits
        self._clock = clock
        self._ears = ears
        self._environ = environ
        self._descriptors = tuple(descriptors)
        self._host: HostProcess[Any] | None = None
        self._changed = asyncio.Event()
        self._heard_s = 0.0
        self._serving_from_s: float | None = None
        self._refused = False
        self._unusable: str | None = None

    @property
    def serving(self) -> bool:
        """Whether the host takes requests."""
        return self._host is not None and self.report.state is State.READY

    @property
    def host(self) -> HostProcess[Any] | None:
        """The host that serves, for who must tell it from its successor."""
        return self._host if self.serving else None

    async def ready(self, *, wait_s: float) -> R:
        """Wait until the host serves and return what it says about itself. Raises DomainError `loading` after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while self.report.state is not State.READY or self.report.ready is None:
                    await self._changed.wait()
        except TimeoutError:
            why = f": {self.report.failure}" if self.report.failure else ""
            raise DomainError(
                Reason.LOADING,
                f"the model is {self.report.state.value} and was not ready within {wait_s:g} s{why}",
                retry_after_ms=2_000,
            ) from None
        return self.report.ready

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; to a dead host it is lost, and `death` says so."""
        if self._host is not None:
            if self._ears.work() == 0:
                self._heard_s = self._clock.monotonic()  # an idle host says nothing, and that is no sign of trouble
            self._host.send(message)

    async def supervise(self) -> None:
        """Keep a host running until cancelled; when this is left, however, there is none any more.

        Returns when the load is given up. Raises EngineUnusableError when trying again is pointless.
        """
        failures = 0
        try:
            while True:
                self._enter(Event.START)
                served_s = await self._serve()
                failures = self._limits.back_off.failures(failures, served_s=served_s)
                if self._limits.loads is not None and (self._refused or failures >= self._limits.loads):
                    return
                await asyncio.sleep(self._limits.back_off.pause_s(failures))
        except asyncio.CancelledError:
            self._retire()
            raise

    async def _serve(self) -> float:
        """Run one host to its end; return how long it served, seconds."""
        self._heard_s = self._clock.monotonic()
        self._serving_from_s, self._refused = None, False
        host = await HostProcess[Any].start(
            self._role.program,
            self._role.name,
            self._role.messages,
            self._hear,
            environ=self._environ,
            descriptors=self._descriptors,
        )
        self._host, self.report.pid = host, host.pid
        try:
            host.send(self._config)
            why = await self._watch(host)
        except asyncio.CancelledError:
            if self.report.state is State.LOADING:
                host.kill()  # while it loads it does not hear the socket close
            self._enter(Event.STOP)
            raise
        finally:
            self._host, self.report.pid = None, None
            await host.stop()
        now_s = self._clock.monotonic()
        served_s = 0.0 if self._serving_from_s is None else now_s - self._serving_from_s
        self._bury(why)
        return served_s

    def _retire(self) -> None:
        """Note that the host was ended on purpose."""
        if self.report.state in {State.LOADING, State.FAILED}:
            self._enter(Event.STOP)
        self._settle("it was unloaded")
        if self.report.state is State.UNLOADING:
            self._enter(Event.STOPPED)

    async def _watch(self, host: HostProcess[Any]) -> str:
        """Wait for the host's end and return how it came; a host that is stuck is killed."""
        while True:
            try:
                async with asyncio.timeout(_WATCH_S):
                    await host.wait_closed()
            except TimeoutError:
                silent_s = self._clock.monotonic() - self._heard_s
                loading = self.report.state is State.LOADING
                limit_s = self._limits.load_s if loading else self._limits.stuck_s
                if is_stuck(active=1 if loading else self._ears.work(), silent_s=silent_s, limit_s=limit_s):
                    self.report.stuck = True
                    host.kill()
                    await host.ended()
                    return f"it did nothing for {silent_s:.0f} s and was killed"
            else:
                return await host.ended()

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - of the role's types
        self._heard_s = self._clock.monotonic()
        report = self.report
        if isinstance(message, Loading):
            report.progress = message.progress
            self._tell()
        elif isinstance(message, self._role.ready):
            report.ready, report.failure, report.progress = message, None, None
            self._serving_from_s = self._heard_s
            self._enter(Event.LOADED)
        elif isinstance(message, LoadFailed):
            report.failure, self._refused = message.message, True
            self._unusable = message.message if message.permanent else None
            self._enter(Event.LOAD_FAILED)
        else:
            self._ears.message(message)

    def _bury(self, why: str) -> None:
        """Account for a host that is gone."""
        if self._unusable is not None:
            raise EngineUnusableError(self._unusable)
        report = self.report
        if report.state is not State.FAILED:
            report.failure = f"the engine died: {why}"
            report.crashes += 1
            _log.error("host died", role=self._role.name, why=why, requests=self._ears.work(), crashes=report.crashes)
            self._enter(Event.DIED)
        else:
            _log.error("model did not load", role=self._role.name, why=report.failure)
        self._settle(why)

    def _settle(self, why: str) -> None:
        """Forget what was true of a host that is gone."""
        report = self.report
        report.ready, report.progress, report.stuck = None, None, False
        self._ears.death(why)

    def _enter(self, event: Event) -> None:
        self.report.state = after(self.report.state, event)
        self._ears.state(self.report.state)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
