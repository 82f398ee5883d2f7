"""Where a model's layers go: to a GPU as far as its memory reaches, or honestly to the CPU."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

ALL_LAYERS: Final = -1
# What llama.cpp logs when the weights are where they belong.
_OFFLOADED: Final = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU; sizes in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DriverSight:
    """The GPUs that the machine's driver tells of, by name; `trouble`: why it is there and tells nothing."""

    devices: tuple[str, ...] = ()
    trouble: str = ""


NO_DRIVER: Final = DriverSight()


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
    driver: DriverSight = NO_DRIVER,
    model_bytes: int,
    layers: int,
    keep_free_bytes: int,
    allow_cpu_fallback: bool,
) -> Placed:
    """Decide the placement. `asked` None means automatic, negative means all layers. `gpus`: what llama.cpp can compute on.

    Automatic offloads as many layers as fit into the freest GPU after `keep_free_bytes`. On a machine without a GPU it means
    CPU, and that is not degraded; where the driver has GPUs, or cannot tell, and llama.cpp has none, it is. Raises
    PlacementError when layers were asked for and no GPU can take any, unless the fallback is allowed: then it is the CPU,
    degraded.
    """
    if asked == 0:
        return Placed(0, "cpu")
    if not gpus and asked is None:
        reason = _unused(driver)
        return Placed(0, "cpu", degraded=bool(reason), reason=reason)
    if not gpus:
        wanted = "all layers" if asked is None or asked < 0 else f"{asked} layers"
        why = _unused(driver) or "llama.cpp has no GPU backend here"
        reason = f"{wanted} were asked for on a GPU, but {why}"
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


def checked(placed: Placed, log: Iterable[str]) -> Placed:
    """Return the placement as llama.cpp's log of the load tells it: degraded when fewer layers than meant are on the device."""
    found = next((match for line in log if (match := _OFFLOADED.search(line)) is not None), None)
    if placed.gpu_layers == 0 or found is None:
        return placed
    there, all_layers = int(found[1]), int(found[2])
    meant = all_layers if placed.gpu_layers < 0 else placed.gpu_layers
    if there >= meant:
        return placed
    reason = f"{meant} of {all_layers} layers were to be on {placed.device}, and llama.cpp put {there} there"
    return replace(placed, gpu_layers=there, device=placed.device if there else "cpu", degraded=True, reason=reason)


def _unused(driver: DriverSight) -> str:
    """Return why a machine's GPUs are not used by llama.cpp; empty where there are none."""
    if driver.devices:
        return f"the driver shows {', '.join(driver.devices)}, and llama.cpp has no GPU backend here"
    return f"it cannot be told whether there is one: {driver.trouble}" if driver.trouble else ""
