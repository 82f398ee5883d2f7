"""Where a model goes on a machine whose driver shows a GPU that llama.cpp cannot use: the stand-in for NVIDIA's library."""

import asyncio
import ctypes
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.kit.clock import SystemClock
from services.kit.hosts.keeper import EngineLimits, EngineUnusableError
from services.llm.adapters.engine import Engine
from services.llm.core.placement import NO_DRIVER, DriverSight
from services.llm.host import driver
from services.llm.served import read_served
from services.llm.settings import LlmSettings
from tests.fixtures import nvml as stand_in
from tests.fixtures.nvml import StandIn


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def world(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A GPU, for this process and for the hosts that it starts."""
    ctypes.CDLL(str(library / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    shown = StandIn(tmp_path / "nvml", [("NVIDIA L4", 24_576, 20_000)]).show()
    for name, value in shown.environ(library).items():
        monkeypatch.setenv(name, value)
    yield shown
    shown.mend()


def engine(**changes: object) -> Engine:
    (served,) = read_served(LlmSettings(ctx=256, contexts=1, warm_prefixes=0, embedding_gguf="none"))
    config = msgspec.structs.replace(served.chat, **changes)
    return Engine(config, EngineLimits(), SystemClock(), environ={}, on_state=lambda _: None)


def test_the_driver_tells_the_names_of_its_devices(world: StandIn) -> None:
    assert driver.look() == DriverSight(("NVIDIA_L4",))
    world.gpus.clear()
    world.show()
    assert driver.look() == NO_DRIVER


def test_a_driver_in_trouble_says_so_and_one_that_hangs_is_not_waited_for(
    world: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fail("nvmlDeviceGetCount", 999)
    assert "NVIDIA's driver says" in driver.look().trouble
    world.mend()
    monkeypatch.setattr(driver, "_PATIENCE_S", 0.05)
    world.hang("nvmlDeviceGetCount")
    assert "did not answer" in driver.look().trouble


async def test_automatic_layers_beside_a_gpu_that_is_not_used_are_degraded_and_served(world: StandIn) -> None:
    config = engine()
    serving = asyncio.create_task(config.supervise())
    try:
        ready = await config._keeper.ready(wait_s=100)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    assert (ready.device, ready.gpu_layers, ready.degraded) == ("cpu", 0, True)
    assert ready.reason == "the driver shows NVIDIA_L4, and llama.cpp has no GPU backend here"
    assert (ready.profile, ready.batch_tokens, ready.ubatch_tokens, ready.kv_type) == ("cpu", 2048, 512, "f16")


async def test_layers_that_cannot_go_to_the_gpu_end_the_engine_with_the_reason(world: StandIn) -> None:
    with pytest.raises(EngineUnusableError, match=r"20 layers were asked for .* the driver shows NVIDIA_L4"):
        await engine(gpu_layers=20).supervise()
