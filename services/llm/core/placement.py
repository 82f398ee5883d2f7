"""Where a model's layers go: to a GPU as far as its memory reaches, or honestly to the CPU."""

from dataclasses import dataclass
from typing import Final

ALL_LAYERS: Final = -1


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU; sizes in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Decision: `gpu_layers` to offload (ALL_LAYERS: every one), the device's name, and whether less than was asked for."""

    gpu_layers: int
    device: str
    degraded: bool = False
    reason: str = ""


class PlacementError(Exception):
    """The layers that were asked for cannot be placed."""


def place(
    *,
    asked: int | None,
    gpus: list[Device],
    model_bytes: int,
    layers: int,
    keep_free_bytes: int,
    allow_cpu_fallback: bool,
) -> Placed:
    """Decide the placement. `asked` None means automatic, negative means all layers.

    Automatic offloads as many layers as fit into the freest GPU after `keep_free_bytes`; without a GPU it means CPU, and
    that is not degraded. Raises PlacementError when layers were asked for and no GPU can take any, unless the fallback
    is allowed: then it is the CPU, degraded.
    """
    if asked == 0 or (asked is None and not gpus):
        return Placed(0, "cpu")
    if not gpus:
        wanted = "all layers" if asked is None or asked < 0 else f"{asked} layers"
        reason = f"{wanted} were asked for on a GPU, but llama.cpp has no GPU backend here"
        if not allow_cpu_fallback:
            raise PlacementError(f"{reason}; set OMNISERVE_LLM_ALLOW_CPU_FALLBACK=1 to run on the CPU all the same")
        return Placed(0, "cpu", degraded=True, reason=reason)
    best = max(gpus, key=lambda device: device.free)
    if asked is not None:
        return Placed(ALL_LAYERS if asked < 0 or asked > layers else asked, best.name)
    room = max(0, best.free - keep_free_bytes)
    if room >= model_bytes:
        return Placed(ALL_LAYERS, best.name)
    fitting = layers * room // max(model_bytes, 1)
    return Placed(fitting, best.name if fitting else "cpu")
