"""Every background task has an owner, and a crashed task ends the process instead of leaving half of it alive."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from services.kit import telemetry

_log = telemetry.logger(__name__)


T = TypeVar("T")


class OwnedTaskCrashed(Exception):  # noqa: N818 - reads as the event it is
    """A background task ended by an exception. `__cause__` is that exception, `task` the task's name."""

    def __init__(self, task: str) -> None:
        super().__init__(f"background task {task!r} crashed")
        self.task = task


class Owner:
    """Owns background tasks for as long as its `async with` block runs.

    Leaving the block cancels what still runs and waits for it. When a task crashes, everything the owner holds and the
    block itself are cancelled, and leaving the block raises OwnedTaskCrashed. A task that returns, or that is
    cancelled, has not crashed.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._entered = False
        self._crash: OwnedTaskCrashed | None = None
        self._crashed = asyncio.Event()

    @property
    def crash(self) -> OwnedTaskCrashed | None:
        """The first crash, or None."""
        return self._crash

    async def wait_crashed(self) -> OwnedTaskCrashed:
        """Wait until a task has crashed and return the crash."""
        while self._crash is None:
            await self._crashed.wait()
        return self._crash

    def start(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run a coroutine in the background until it returns, crashes, is cancelled, or the owner's block ends.

        Raises RuntimeError outside the owner's block and while it is being left.
        """
        if not self._entered:
            coro.close()
            raise RuntimeError(f"background task {name!r} started outside its owner's `async with` block")
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        _log.error("background task crashed", task=task.get_name(), exc_info=error)
        if self._crash is None:
            self._crash = OwnedTaskCrashed(task.get_name())
            self._crash.__cause__ = error
            self._crashed.set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        for task in tuple(self._tasks):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            if self._crash is not None:
                raise self._crash from self._crash.__cause__
            if error is not None:
                raise error from None  # the body's own exception, not a group of one
            raise
