"""What host processes share: the first message, and an end that is noticed."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

from services.kit.hosts.core.framing import Frames
from services.kit.hosts.pipe import Pipe

_HOST_FAILED: Final = 3
C = TypeVar("C")


def first(pipe: Pipe, frames: Frames[Any], kind: type[C]) -> C:
    """Wait for the configuration, which comes before anything else."""
    while True:
        for message in frames.feed(pipe.receive()):
            if not isinstance(message, kind):
                raise TypeError(f"{type(message).__name__} before the configuration")
            return message


def compute_and_listen(compute: Callable[[], None], listen: Callable[[], None]) -> None:
    """Run both for ever, `compute` in this thread; the process ends when either fails.

    The thread that loaded is the one that computes. OpenMP gives every thread that computes workers of its own, and once
    there are more of them than cores it no longer lets any spin: steps took half as long again.
    """
    threading.Thread(target=_or_end, args=(listen,), name="commands").start()
    _or_end(compute)


def _or_end(work: Callable[[], None]) -> None:
    """Do what never returns; end the process when it fails: without either of its threads it is worth nothing."""
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever it was
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(_HOST_FAILED)
