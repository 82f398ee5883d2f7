"""NVIDIA's devices through NVML, by its own binding. Blocking; behind the guard of driver.py."""

import ctypes
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pynvml

from services.vram.adapters.driver import DriverError, Sight
from services.vram.core.model import Facts, Kind

MIB: Final = 1024 * 1024
_LIBRARY: Final = "libnvidia-ml.so.1"
_SIGNS: Final = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
# Stands for a figure that the driver does not tell.
_NOT_TOLD: Final = 2**64 - 1
_NOT_ATTRIBUTED: Final = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLLibraryMismatchError,
)


def is_here() -> bool:
    """Return whether this machine shows any sign of an NVIDIA driver, working or not."""
    if any(sign.exists() for sign in _SIGNS):
        return True
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


class Nvml:
    """The devices of the NVIDIA driver, gpu0, gpu1, ... in the driver's order."""

    def __init__(self) -> None:
        self._devices: dict[str, tuple[Facts, Any]] = {}

    def read(self, pids: Collection[int]) -> Mapping[str, Sight | DriverError]:  # noqa: ARG002 - NVML tells all of them
        """Return what is seen on each device. Raises DriverError when the library does not start."""
        self._start()
        if not self._devices:
            raise DriverError("it knows no device")
        found = {name: _sight(facts, handle) for name, (facts, handle) in self._devices.items()}
        if all(isinstance(each, DriverError) for each in found.values()):
            self._stop()  # after a new start a driver that was reset or replaced answers again
        return found

    def _start(self) -> None:
        if self._devices:
            return
        _asked(pynvml.nvmlInit)
        try:
            count = int(_asked(pynvml.nvmlDeviceGetCount))
            for number in range(count):
                handle = _asked(partial(pynvml.nvmlDeviceGetHandleByIndex, number))
                name = _asked(partial(pynvml.nvmlDeviceGetName, handle))
                text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
                self._devices[f"gpu{number}"] = Facts(f"gpu{number}", text, Kind.GPU), handle
        except DriverError:
            self._stop()
            raise

    def _stop(self) -> None:
        self._devices = {}
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _sight(facts: Facts, handle: Any) -> Sight | DriverError:  # noqa: ANN401 - NVML's handle
    """Read a device. Processes are read before and after its free memory: what moves meanwhile counts as not allocated."""
    try:
        before = _used(handle)
        memory = _asked(partial(pynvml.nvmlDeviceGetMemoryInfo, handle))
        after = _used(handle)
    except DriverError as error:
        return error
    used = None
    if before is not None and after is not None:
        used = {pid: min(mib, after[pid]) for pid, mib in before.items() if pid in after}
    return Sight(facts, int(memory.total) // MIB, int(memory.free) // MIB, used)


def _used(handle: Any) -> dict[int, int] | None:  # noqa: ANN401 - NVML's handle
    """Return what each process uses, MiB; None where the driver does not attribute memory: on WSL, or an old one."""
    found: dict[int, int] = {}
    try:
        for kind in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
            for process in kind(handle):
                used = process.usedGpuMemory
                if used is None or int(used) == _NOT_TOLD:
                    return None
                # One that computes and draws is in both lists, with the same figure.
                found[int(process.pid)] = max(found.get(int(process.pid), 0), int(used) // MIB)
    except _NOT_ATTRIBUTED:
        return None
    except pynvml.NVMLError as error:
        raise DriverError(_told(error)) from error
    return found


def _asked(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - NVML's answers
    try:
        return call()
    except pynvml.NVMLError as error:
        raise DriverError(_told(error)) from error


def _told(error: Any) -> str:  # noqa: ANN401 - NVML's errors
    if getattr(error, "value", None) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return f"{_LIBRARY} cannot be loaded"
    return f"NVML says {error}"
