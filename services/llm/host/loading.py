"""The load of a model with its progress, in whichever host."""

from pathlib import Path
from typing import Final

from services.kit.hosts.core.messages import Loading
from services.kit.hosts.pipe import Pipe
from services.llm.core.placement import NO_DRIVER, Placed, checked, place
from services.llm.host import driver
from services.llm.host.llama import Model, gpus, log, start_backend

_MIB: Final = 1024 * 1024


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
    devices = gpus()
    placed = place(
        asked=gpu_layers,
        gpus=devices,
        driver=NO_DRIVER if devices or gpu_layers == 0 else driver.look(),
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

    log.lines.clear()
    model = Model.load(path, gpu_layers=placed.gpu_layers, progress=progress)
    return model, checked(placed, log.lines)
