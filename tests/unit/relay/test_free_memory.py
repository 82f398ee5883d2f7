"""Free memory: of the device with most, of the host where there is no device, and unknown when the driver fails."""

from types import SimpleNamespace

from services.relay.adapters.free_memory import FreeMemory

MIB = 1024 * 1024


class NvmlError(Exception):
    def __init__(self, value):
        self.value = value


class Nvml:
    """Stands for the driver's library. `free`: MiB of each device, or an error's number."""

    NVMLError = NvmlError
    NVML_ERROR_LIBRARY_NOT_FOUND = 12

    def __init__(self, *free, init=None):
        self.free = free
        self.init = init
        self.open = 0

    def nvmlInit(self):  # noqa: N802 - the library's name
        if self.init is not None:
            raise NvmlError(self.init)
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802 - as above
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802 - as above
        return len(self.free)

    def nvmlDeviceGetHandleByIndex(self, number):  # noqa: N802 - as above
        return self.free[number]

    def nvmlDeviceGetMemoryInfo(self, free):  # noqa: N802 - as above
        if free is None:
            raise NvmlError(15)
        return SimpleNamespace(free=free * MIB)


def test_the_device_with_most_room_counts():
    nvml = Nvml(100, 900, 300)
    assert FreeMemory(nvml)() == 900
    assert nvml.open == 0


def test_a_failing_driver_is_unknown_and_not_zero():
    nvml = Nvml(None)
    assert FreeMemory(nvml)() is None
    assert FreeMemory(Nvml(init=9))() is None
    assert FreeMemory(Nvml())() is None
    assert nvml.open == 0


def test_without_the_library_the_hosts_memory_counts():
    assert FreeMemory(Nvml(init=Nvml.NVML_ERROR_LIBRARY_NOT_FOUND))() > 0
