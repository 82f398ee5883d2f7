"""Free memory of the devices: NVML's word, or the host's RAM where there is no such device at all."""

from typing import Any, Final

import psutil
import pynvml

_MIB: Final = 1024 * 1024


class FreeMemory:
    """Asks the driver anew each time, since it may come and go."""

    def __init__(self, nvml: Any = pynvml) -> None:  # noqa: ANN401 - a module without types
        self._nvml = nvml

    def __call__(self) -> int | None:
        """Return the MiB free on the device that has most, None when the driver fails. May block for milliseconds."""
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            return self._of_host() if self._is_absent(error) else None
        try:
            return max((self._of_device(number) for number in range(self._nvml.nvmlDeviceGetCount())), default=None)
        except self._nvml.NVMLError:
            return None
        finally:
            self._nvml.nvmlShutdown()

    def _of_device(self, number: int) -> int:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free) // _MIB

    def _of_host(self) -> int:
        return int(psutil.virtual_memory().available) // _MIB

    def _is_absent(self, error: Any) -> bool:  # noqa: ANN401 - NVML's own error
        return bool(error.value == self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND)
