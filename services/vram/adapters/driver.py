"""Asks the driver in a thread of its own, so that one that hangs, fails or lies costs a caller no more than a denial.

Nothing is asked of a driver that failed before a growing pause is over, and never is it asked twice at once: a call that
hangs in it keeps the one thread, and its devices stay unknown until it returns.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from services.kit import telemetry
from services.kit.clock import Clock
from services.vram.core.model import Facts, Failure, Reading

_log = telemetry.logger(__name__)

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0


class DriverError(Exception):
    """The driver did not say what was asked."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen on one device, MiB. `used_mib`: by process; None when it is not attributed."""

    facts: Facts
    total_mib: int
    free_mib: int
    used_mib: Mapping[int, int] | None


class Source(Protocol):
    """What knows the memory of devices."""

    def read(self, pids: Collection[int]) -> Mapping[str, Sight | DriverError]:
        """Return what is seen on each device; blocks, and may hang. `pids`: the processes of interest.

        Raises DriverError when it cannot be asked at all.
        """
        ...


T = TypeVar("T")


class Driver:
    """The source behind its guard. All methods are for one event loop.

    `devices`: those that are there at least; more come to be known by what the driver says. `limit_s`: how long an
    answer may take.
    """

    def __init__(self, source: Source, clock: Clock, devices: Iterable[Facts], *, limit_s: float) -> None:
        self.devices: dict[str, Facts] = {each.device: each for each in devices}
        self._source = source
        self._clock = clock
        self._limit_s = limit_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._pauses: dict[str, tuple[float, float]] = {}

    def rests(self) -> bool:
        """Return whether every device has failed, and there is nothing to ask before a pause is over."""
        now = self._clock.monotonic()
        return all(each in self._pauses and now < self._pauses[each][0] for each in self.devices)

    async def read(self, mark: int, pids: Collection[int]) -> dict[str, Reading | Failure]:
        """Return a reading or a failure of every device; nothing while it rests. `mark`: the ledger's, from now."""
        if self.rests():
            return {}
        at = self._clock.monotonic()
        found = await self._ask(lambda: self._source.read(pids))
        if not isinstance(found, DriverError):
            self.devices |= {name: sight.facts for name, sight in found.items() if isinstance(sight, Sight)}
        return {
            device: self._judged(device, found if isinstance(found, DriverError) else found.get(device), mark, at)
            for device in self.devices
        }

    def _judged(self, device: str, sight: Sight | DriverError | None, mark: int, at: float) -> Reading | Failure:
        if not isinstance(sight, Sight):
            return self._failed(device, str(sight or "it does not tell about this device"))
        if (nonsense := _nonsense(sight)) is not None:
            return self._failed(device, nonsense)
        if self._pauses.pop(device, None) is not None:
            _log.info("the driver answers again", device=device)
        return Reading(mark, at, sight.total_mib, sight.free_mib, sight.used_mib)

    def _failed(self, device: str, message: str) -> Failure:
        pause = self._pauses.get(device)
        if pause is not None and self._clock.monotonic() < pause[0]:
            return Failure(message, pause[0])  # asked again for another device's sake
        seconds = FIRST_PAUSE_S if pause is None else min(pause[1] * 2, LONGEST_PAUSE_S)
        retry_at = self._clock.monotonic() + seconds
        self._pauses[device] = (retry_at, seconds)
        if pause is None:
            _log.warning("the driver fails: what is free is unknown", device=device, error=message)
        return Failure(message, retry_at)

    async def _ask(self, call: Callable[[], T]) -> T | DriverError:
        """Run a call in the thread; a DriverError when it fails, or takes too long."""
        if self._is_busy:
            return DriverError("it hangs: an earlier question is still unanswered")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T | DriverError] = loop.create_future()

        def tell(result: T | DriverError) -> None:
            self._is_busy = False
            if not answer.done():
                answer.set_result(result)

        def job() -> None:
            result = _guarded(call)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, result)

        self._start_thread()
        self._is_busy = True
        self._jobs.put(job)
        try:
            async with asyncio.timeout(self._limit_s):
                return await answer
        except TimeoutError:
            return DriverError(f"it did not answer within {self._limit_s:g} s")

    def _start_thread(self) -> None:
        if self._thread is None:
            # A daemon: a driver that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="driver", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Let the thread end when it is done."""
        self._jobs.put(None)


def _guarded(call: Callable[[], T]) -> T | DriverError:
    try:
        return call()
    except DriverError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a driver's binding may raise anything, and the thread must go on
        return DriverError(f"{type(error).__name__}: {error}")


def _nonsense(sight: Sight) -> str | None:
    """Return what cannot be true of a device, or None."""
    if sight.total_mib <= 0:
        return f"it claims a device of {sight.total_mib} MiB"
    if not 0 <= sight.free_mib <= sight.total_mib:
        return f"it claims {sight.free_mib} MiB free of {sight.total_mib} MiB"
    if sight.used_mib is not None and any(used < 0 for used in sight.used_mib.values()):
        return "it claims that a process uses less than nothing"
    return None
