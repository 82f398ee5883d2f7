"""vram on NVIDIA's real binding, over a stand-in for the driver's library: several devices, failures, nonsense, hangs."""

import ctypes
import os

import grpc
import pytest

from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from services.kit.access import TOKEN_KEY
from services.kit.tokens import ensure_token
from services.vram.adapters.driver import DriverError
from services.vram.adapters.nvml import Nvml
from tests.fixtures import nvml as stand_in
from tests.fixtures.nvml import StandIn
from tests.service.conftest import running, serving

TWO = [("RTX 5090", 32_768, 30_000), ("RTX 4000", 20_480, 20_000)]
MEMORY, PROCESSES = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return stand_in.build(tmp_path_factory.mktemp("nvml"))


# ---- the adapter -------------------------------------------------------------------------------------------------


@pytest.fixture
def world(library, tmp_path, monkeypatch):
    """The adapter in this process: the library is loaded by hand, under the name that the binding asks for."""
    ctypes.CDLL(str(library / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    shown = StandIn(tmp_path / "nvml", list(TWO)).show()
    monkeypatch.setenv("STAND_IN_NVML", str(shown.path))
    adapter = Nvml()
    yield shown, adapter
    adapter._stop()


def test_every_device_tells_its_name_its_memory_and_its_processes(world):
    shown, adapter = world
    shown.uses = [(0, 7, 1000), (0, 8, 50), (1, 7, 3)]
    shown.show()
    found = adapter.read(())
    assert [(each.facts.device, each.facts.name) for each in found.values()] == [
        ("gpu0", "RTX_5090"),
        ("gpu1", "RTX_4000"),
    ]
    assert [(each.total_mib, each.free_mib, each.used_mib) for each in found.values()] == [
        (32_768, 30_000, {7: 1000, 8: 50}),
        (20_480, 20_000, {7: 3}),
    ]


def test_memory_that_the_driver_does_not_attribute_is_not_taken_for_none(world):
    shown, adapter = world
    shown.uses = [(0, 7, -1)]
    shown.show()
    assert adapter.read(())["gpu0"].used_mib is None
    shown.uses = []
    shown.fail(PROCESSES, 3)  # not supported
    assert adapter.read(())["gpu0"].used_mib is None
    assert adapter.read(())["gpu0"].free_mib == 30_000


def test_a_failure_names_what_the_driver_says_and_a_new_start_mends_it(world):
    shown, adapter = world
    adapter.read(())
    shown.fail(MEMORY, 15)  # the GPU is lost
    assert all("NVML says" in str(each) for each in adapter.read(()).values())
    shown.mend()
    assert adapter.read(())["gpu1"].free_mib == 20_000


def test_a_driver_that_is_not_loaded_or_knows_no_device_fails(world):
    shown, adapter = world
    shown.unload()
    with pytest.raises(DriverError, match="Driver Not Loaded"):
        adapter.read(())
    shown.gpus = []
    shown.show()
    with pytest.raises(DriverError, match="no device"):
        adapter.read(())
    shown.gpus = list(TWO)
    shown.show()
    assert set(adapter.read(())) == {"gpu0", "gpu1"}


# ---- the service -------------------------------------------------------------------------------------------------


class Served:
    """A vram process on the stand-in driver."""

    def __init__(self, address, state_dir, shown):
        self.shown = shown
        self.channel = grpc.insecure_channel(address)
        self.stub = vram_pb2_grpc.VramServiceStub(self.channel)
        self.token = ((TOKEN_KEY, ensure_token(state_dir, "cli")),)

    def lease(self, size, device="gpu0", **fields):
        item = pb.LeaseItem(size_mib=size, device=device)
        return self.stub.Lease(pb.LeaseRequest(tenant="t", items=[item], **fields), metadata=self.token, timeout=60)

    def device(self, name="gpu0"):
        state = self.stub.GetState(pb.GetStateRequest(devices=[name]), metadata=self.token, timeout=60)
        return state.devices[0]


@pytest.fixture(scope="module")
def served(library, tmp_path_factory, free_ports, wait_until):
    folder = tmp_path_factory.mktemp("vram")
    shown = StandIn(folder / "nvml", list(TWO)).show()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    environ = {
        "OMNISERVE_STATE_DIR": str(folder),
        "OMNISERVE_VRAM_LISTEN": address,
        "OMNISERVE_VRAM_KEEP_FREE_MB": "0",
        "OMNISERVE_VRAM_FRESH_S": "0",
        "OMNISERVE_VRAM_DRIVER_LIMIT_S": "0.5",
        **shown.environ(library),
    }
    with running("services.vram", environ, folder / "vram.log"):
        wait_until(lambda: serving(address), "vram serves")
        found = Served(address, folder, shown)
        yield found
        found.channel.close()


@pytest.fixture
def vram(served, wait_until):
    yield served
    served.shown.gpus, served.shown.uses = list(TWO), []
    served.shown.mend()
    state = served.stub.GetState(pb.GetStateRequest(), metadata=served.token, timeout=60)
    for lease in state.leases:
        served.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id), metadata=served.token)
    wait_until(lambda: served.device().driver == pb.DRIVER_STATE_OK, "the driver is asked again")


def test_leases_go_by_device(vram):
    assert vram.lease(30_000).granted
    assert not vram.lease(1).granted
    assert vram.lease(20_000, "gpu1").granted
    assert vram.device("gpu1").name == "RTX_4000"
    both = pb.LeaseRequest(tenant="t", items=[pb.LeaseItem(size_mib=1), pb.LeaseItem(size_mib=1)])
    assert not vram.stub.Lease(both, metadata=vram.token).granted


def test_what_a_process_allocates_is_told_by_the_driver_and_counts_once(vram):
    lease = vram.lease(10_000, pid=os.getpid())
    vram.shown.uses = [(0, os.getpid(), 10_000)]
    vram.shown.set_free(0, 20_000)
    device = vram.device()
    assert (device.granted_mib, device.promised_mib, device.free_mib) == (10_000, 0, 20_000)
    assert device.processes[0].lease_id == lease.lease_id
    assert device.processes[0].name
    assert vram.lease(20_000).granted


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [(MEMORY, 999, "NVML says"), (MEMORY, 15, "NVML says"), (PROCESSES, 999, "NVML says")],
)
def test_a_driver_that_fails_is_unknown_and_the_service_goes_on(vram, function, code, words):
    lease = vram.lease(100)
    vram.shown.fail(function, code)
    denied = vram.lease(1)
    assert denied.denied.reason == pb.DENIAL_REASON_DRIVER_UNKNOWN
    assert words in denied.denied.message
    device = vram.device()
    assert (device.driver, device.HasField("free_mib")) == (pb.DRIVER_STATE_UNKNOWN, False)
    assert device.driver_retry_ms > 0
    assert vram.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id), metadata=vram.token).lease.ttl_s == 120


def test_a_driver_that_returns_nonsense_is_unknown(vram):
    vram.shown.gpus = [("RTX 5090", 32_768, 40_000), ("RTX 4000", 0, 0)]
    vram.shown.show()
    assert "40000 MiB free of 32768" in vram.lease(1).denied.message
    assert "a device of 0 MiB" in vram.lease(1, "gpu1").denied.message


def test_a_driver_that_hangs_is_unknown_and_the_service_goes_on(vram, wait_until):
    lease = vram.lease(100)
    vram.shown.hang(MEMORY)
    denied = vram.lease(1)
    assert denied.denied.reason == pb.DENIAL_REASON_DRIVER_UNKNOWN
    assert "did not answer within 0.5 s" in denied.denied.message
    for _ in range(20):
        assert vram.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id), metadata=vram.token).lease.lease_id
        assert vram.device().driver == pb.DRIVER_STATE_UNKNOWN
    vram.shown.mend()
    wait_until(lambda: vram.lease(1).granted, "grants begin again")


def test_a_service_ends_in_time_although_its_driver_hangs(library, tmp_path, free_ports, wait_until):
    shown = StandIn(tmp_path / "nvml").show()
    shown.hang("nvmlInit")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    environ = {
        "OMNISERVE_STATE_DIR": str(tmp_path),
        "OMNISERVE_VRAM_LISTEN": address,
        "OMNISERVE_VRAM_DRIVER_LIMIT_S": "0.2",
        "OMNISERVE_DRAIN_GRACE_S": "1",
        **shown.environ(library),
    }
    with running("services.vram", environ, tmp_path / "vram.log") as process:
        wait_until(lambda: serving(address), "vram serves")
        found = Served(address, tmp_path, shown)
        assert found.device().driver == pb.DRIVER_STATE_UNKNOWN
        found.channel.close()
        process.terminate()
        assert process.wait(100) == 0
