"""Judges the machine: memory, disk, GPU. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.doctor.report import Finding, fail, ok, warn
from cli.terminal import human_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIB, _GIB = 1 << 20, 1 << 30
# What the services take beside the model: eight Python processes, Envoy, and the engine's context.
_BESIDE_MODEL_BYTES = 1 * _GIB
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = 256 * _MIB, 2 * _GIB
_GPU_REBUILD = (
    "rebuild the engine with the CUDA toolkit installed: "
    "CMAKE_ARGS=-DGGML_CUDA=on .venv/bin/pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"
)


def check_memory(total: int, available: int, model: int, *, running: bool) -> Finding:
    """Judge host memory against the model's size, bytes. `running`: the mesh has its memory already."""
    seen = f"{human_size(available)} available of {human_size(total)}"
    if total < model:
        return fail(
            "memory", f"{seen}; the model alone is {human_size(model)}", "choose a smaller model or quantisation"
        )
    wanted = _BESIDE_MODEL_BYTES + model
    if not running and available < wanted:
        return warn(
            "memory",
            f"{seen}; the mesh wants about {human_size(wanted)}",
            "stop other programs or choose a smaller model",
        )
    return ok("memory", seen)


def check_disk(subject: str, folder: str, free: int) -> Finding:
    """Judge the file system that holds `folder`; `free` in bytes."""
    seen = f"{human_size(free)} free at {folder}"
    if free < _DISK_FAIL_BYTES:
        return fail(subject, seen, "make room: logs and journals cannot be written")
    if free < _DISK_WARN_BYTES:
        return warn(subject, seen, "make room before fetching models")
    return ok(subject, seen)


@dataclass(frozen=True)
class Gpu:
    """One device as the driver describes it; sizes in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class GpuSeen:
    """What the driver said. `error`: why it did not answer; `hardware`: an NVIDIA device is on the bus."""

    devices: Sequence[Gpu] = ()
    driver: str = ""
    error: str = ""
    hardware: bool = False


def check_gpu(seen: GpuSeen, *, engine_can: bool, layers_asked: object, may_fall_back: bool) -> Finding:
    """Judge the GPU. `engine_can`: the engine has a GPU backend.

    `layers_asked`: how many layers the settings put on the device, -1 for all, or "auto"; `may_fall_back`: they allow
    the CPU instead.
    """
    if seen.devices:
        return _check_devices(seen, engine_can=engine_can)
    if seen.hardware:
        return warn(
            "gpu",
            f"an NVIDIA device is there, but its driver does not answer: {seen.error}",
            "install the driver, or restart the machine when it was just updated; in a container, pass the device in",
        )
    if isinstance(layers_asked, int) and layers_asked != 0 and not may_fall_back:
        return fail(
            "gpu",
            f"none, but OMNISERVE_LLM_NGL={layers_asked} asks for one, so llm does not start",
            "unset OMNISERVE_LLM_NGL, or set OMNISERVE_LLM_ALLOW_CPU_FALLBACK=1",
        )
    return ok("gpu", "none; models run on the CPU")


def _check_devices(seen: GpuSeen, *, engine_can: bool) -> Finding:
    names = ", ".join(f"{gpu.name} ({human_size(gpu.free)} free of {human_size(gpu.total)})" for gpu in seen.devices)
    text = f"{names}, driver {seen.driver}"
    if not engine_can:
        return warn("gpu", f"{text}; but the engine has no GPU backend and runs on the CPU", _GPU_REBUILD)
    return ok("gpu", text)
