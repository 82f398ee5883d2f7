"""The engine host: loads a model, then runs the engine thread beside the one that reads commands."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from services.llm.core.framing import Frames
from services.llm.core.placement import Placed, PlacementError, place
from services.llm.core.wire import EngineConfig, LoadFailed, Loading, Ready, ToEngine
from services.llm.host.context import Context
from services.llm.host.engine import Engine
from services.llm.host.llama import LlamaError, Model, gpus, start_backend, stop_listening
from services.llm.host.pipe import Pipe

_MIB: Final = 1024 * 1024
_ENGINE_FAILED: Final = 3


def serve_engine(pipe: Pipe) -> None:
    """Serve until the service closes the pipe; exit status 0 after a failed load that was reported."""
    frames: Frames[ToEngine] = Frames(ToEngine)
    config = _first(pipe, frames)
    try:
        engine = _load(config, pipe)
    except (LlamaError, PlacementError) as error:
        pipe.send(LoadFailed(str(error), permanent=isinstance(error, PlacementError)))
        return
    # The thread that loaded is the one that computes. OpenMP gives every thread that computes workers of its own, and once
    # there are more of them than cores it no longer lets any spin: steps took half as long again.
    threading.Thread(target=_or_end, args=(lambda: _listen(engine, pipe, frames),), name="commands").start()
    _or_end(engine.run)


def _listen(engine: Engine, pipe: Pipe, frames: Frames[ToEngine]) -> None:
    while True:
        for message in frames.feed(pipe.receive()):
            if isinstance(message, EngineConfig):
                raise TypeError("a second configuration")
            engine.tell(message)


def _first(pipe: Pipe, frames: Frames[ToEngine]) -> EngineConfig:
    while True:
        for message in frames.feed(pipe.receive()):
            if not isinstance(message, EngineConfig):
                raise TypeError(f"{type(message).__name__} before the configuration")
            return message


def _load(config: EngineConfig, pipe: Pipe) -> Engine:
    start_backend()
    placed = place(
        asked=config.gpu_layers,
        gpus=gpus(),
        model_bytes=Path(config.path).stat().st_size,
        layers=config.layers,
        keep_free_bytes=config.keep_free_mib * _MIB,
        allow_cpu_fallback=config.allow_cpu_fallback,
    )
    told = -1

    def progress(done: float) -> None:
        nonlocal told
        if int(done * 20) > told:
            told = int(done * 20)
            pipe.send(Loading(done))

    model = Model.load(config.path, gpu_layers=placed.gpu_layers, progress=progress)
    context = Context(
        model,
        cells=config.context_cells,
        sequences=config.slots + config.warm_sequences,
        batch_tokens=config.batch_tokens,
        ubatch_tokens=config.ubatch_tokens,
        threads=config.threads,
        kv_type=config.kv_type,
        flash_attention=config.flash_attention,
    )
    engine = Engine(config, model, context, pipe.send)
    stop_listening()
    engine.warm_up()
    pipe.send(_ready(config, model, context, placed))
    return engine


def _ready(config: EngineConfig, model: Model, context: Context, placed: Placed) -> Ready:
    layers = model.layers + 1 if placed.gpu_layers < 0 else placed.gpu_layers
    return Ready(
        context_tokens=min(
            context.cells, model.context_tokens or context.cells, config.context_tokens or context.cells
        ),
        kv_cells=context.cells,
        device=placed.device,
        gpu_layers=layers,
        degraded=placed.degraded,
        reason=placed.reason,
        shares_prefixes=model.shares_prefixes,
        flash_attention=context.flash_attention,
    )


def _or_end(work: Callable[[], None]) -> None:
    """Do what never returns; end the process when it fails: without either of its threads it is worth nothing."""
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever it was
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(_ENGINE_FAILED)
