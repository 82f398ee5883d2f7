"""What the machine's GPU driver tells of its devices, whatever llama.cpp can do with them."""

import ctypes
import threading
from typing import Final

import pynvml

from services.llm.core.placement import NO_DRIVER, DriverSight

_LIBRARY: Final = "libnvidia-ml.so.1"
_PATIENCE_S: Final = 5.0


def look() -> DriverSight:
    """Return the devices that NVIDIA's driver knows. It may hang, so it is asked by a thread that is left behind then."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return NO_DRIVER
    seen: list[DriverSight] = []
    asking = threading.Thread(target=lambda: seen.append(_ask()), name="driver", daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    return seen[0] if seen else DriverSight(trouble=f"NVIDIA's driver did not answer within {_PATIENCE_S:g} s")


def _ask() -> DriverSight:
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return DriverSight(trouble=f"NVIDIA's driver says {error}")
    return DriverSight(tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names))
