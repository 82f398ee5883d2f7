"""The jobs of a host, between the thread that hears of them and the one that does them."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from services.diffusion.core.wire import Cancel, Forget, Generate, ToHost, Upscale
from services.kit.hosts.core.framing import Frames
from services.kit.hosts.pipe import Pipe

J = TypeVar("J", Generate, Upscale)


class Jobs(Generic[J]):
    """Jobs in the order they came, numbered upwards; each may be cancelled before or while it is done.

    `forget`: called when the host is to keep none of the encoded prompts.
    """

    def __init__(self, kind: type[J], forget: Callable[[], None] = lambda: None) -> None:
        self._kind: type[J] = kind
        self._forget = forget
        self._waiting: queue.SimpleQueue[J] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._at: int | None = None
        self._last = 0
        self._stop: Callable[[], None] | None = None

    def next(self) -> J:
        """Wait for a job and begin it."""
        job = self._waiting.get()
        with self._lock:
            self._at = job.job
        return job

    def stoppable(self, stop: Callable[[], None] | None) -> None:
        """Have `stop` called when the job that is being done is cancelled, or has been."""
        with self._lock:
            self._stop = stop
            if stop is not None and self._at in self._cancelled:
                stop()

    def is_cancelled(self) -> bool:
        """Return whether the job that is being done is to be ended."""
        with self._lock:
            return self._at in self._cancelled

    def done(self) -> None:
        """Note that nothing is being done."""
        with self._lock:
            self._last = self._at or self._last
            self._cancelled = {each for each in self._cancelled if each > self._last}
            self._at = self._stop = None

    def listen(self, pipe: Pipe, frames: Frames[ToHost]) -> None:
        """Take what the service says, for ever."""
        while True:
            for message in frames.feed(pipe.receive()):
                if isinstance(message, self._kind):
                    self._waiting.put(message)
                elif isinstance(message, Cancel):
                    self._cancel(message.job)
                elif isinstance(message, Forget):
                    self._forget()
                else:
                    raise TypeError(f"{type(message).__name__} is nothing that this host does")

    def _cancel(self, job: int) -> None:
        with self._lock:
            if job > self._last:  # else it ended before this was read
                self._cancelled.add(job)
            if job == self._at and self._stop is not None:
                self._stop()
