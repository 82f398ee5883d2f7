"""What the hosts with weights share: the first message, the load with its progress, and an end that is noticed."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from services.llm.core.framing import Frames
from services.llm.core.placement import Placed, place
from services.llm.core.wire import Loading
from services.llm.host.llama import Model, gpus, start_backend
from services.llm.host.pipe import Pipe

_MIB: Final = 1024 * 1024
_HOST_FAILED: Final = 3
C = TypeVar("C")


def first(pipe: Pipe, frames: Frames[Any], kind: type[C]) -> C:
    """Wait for the configuration, which comes before anything else."""
    while True:
        for message in frames.feed(pipe.receive()):
            if not isinstance(message, kind):
                raise TypeError(f"{type(message).__name__} before the configuration")
            return message


def load_model(
    pipe: Pipe,
    path: str,
    *,
    layers: int,
    gpu_layers: int | None,
    keep_free_mib: int,
    allow_cpu_fallback: bool,
) -> tuple[Model, Placed]:
    """Load a model where it belongs, telling the progress. Raises LlamaError and PlacementError."""
    start_backend()
    placed = place(
        asked=gpu_layers,
        gpus=gpus(),
        model_bytes=Path(path).stat().st_size,
        layers=layers,
        keep_free_bytes=keep_free_mib * _MIB,
        allow_cpu_fallback=allow_cpu_fallback,
    )
    told = -1

    def progress(done: float) -> None:
        nonlocal told
        if int(done * 20) > told:
            told = int(done * 20)
            pipe.send(Loading(done))

    return Model.load(path, gpu_layers=placed.gpu_layers, progress=progress), placed


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
