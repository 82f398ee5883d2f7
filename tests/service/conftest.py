"""Services as real processes without the door in front of them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.diffusion.v1 import diffusion_pb2, diffusion_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from omniserve.vram.v1 import vram_pb2, vram_pb2_grpc
from services.diffusion.native.build import build as build_tap
from services.kit.channels import open_channel
from services.kit.tokens import ensure_token
from services.llm.adapters.model_file import default_path
from tests.fixtures import image_models as image_models_files
from tests.fixtures.gguf_files import cut
from tests.fixtures.image_models import ImageModel

if TYPE_CHECKING:
    from services.llm.host.llama import Model

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.1
"""Between two looks whether services serve, which need the machine for their start."""


@dataclass
class LlmPair:
    """admission and llm, listening on `admission_address` and `address`."""

    state_dir: Path
    address: str
    admission_address: str
    llm: "subprocess.Popen[bytes]"
    log: Path

    def channel(self, caller: str = "facade") -> grpc.aio.Channel:
        """Open a channel to llm as one of the services."""
        return open_channel(self.address, caller=caller, state_dir=self.state_dir)

    async def engines(self) -> dict[str, llm_pb2.EngineStatus]:
        """Return the state of every engine that runs, by its model's name."""
        async with self.channel() as channel:
            status = await llm_pb2_grpc.LlmServiceStub(channel).GetStatus(llm_pb2.GetStatusRequest(), timeout=60)
        return {engine.model: engine for engine in status.engines}

    async def engine(self) -> llm_pb2.EngineStatus:
        """Return the state of the default model's engine, which comes first."""
        return next(iter((await self.engines()).values()))

    async def permits(self) -> tuple[int, int]:
        """Return how many permits are held, and how many asks wait."""
        async with open_channel(self.admission_address, caller="facade", state_dir=self.state_dir) as channel:
            stub = admission_pb2_grpc.AdmissionServiceStub(channel)
            pools = (await stub.GetStatus(admission_pb2.GetStatusRequest(), timeout=60)).pools
        return sum(pool.permits for pool in pools), sum(pool.waiting for pool in pools)

    async def idle(self) -> None:
        """Wait until no sequence and no permit is left."""
        async with asyncio.timeout(150):
            while True:
                engines = (await self.engines()).values()
                left = [number for each in engines for number in (each.active_sequences, each.waiting_requests)]
                if not any((*left, *await self.permits())):
                    return
                await asyncio.sleep(0.02)

    def is_serving(self) -> bool:
        """Return whether llm says SERVING."""
        return serving(self.address)

    async def ready(self) -> None:
        """Wait until llm says SERVING."""
        async with asyncio.timeout(150):
            while not await asyncio.to_thread(serving, self.address):
                await asyncio.sleep(0.05)


def serving(address: str) -> bool:
    """Return whether a service says so."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@contextmanager
def running(module: str, environ: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `python -m <module>` for the length of a block; it drains at the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "OTEL_"))}
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, "-m", module], cwd=ROOT, env={**clean, **environ}, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def start_llm(
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
    wait_until: Callable[..., None],
) -> "Callable[..., contextmanager[LlmPair]]":
    """Return what starts a pair of admission and llm with further settings."""

    @contextmanager
    def start(*, with_admission: bool = True, **settings: str) -> Iterator[LlmPair]:
        folder = tmp_path_factory.mktemp("llm")
        ports = free_ports(2)
        admission_address, address = (f"127.0.0.1:{port}" for port in ports)
        ensure_token(folder, "facade")
        environ = {
            "OMNISERVE_STATE_DIR": str(folder),
            "OMNISERVE_ADMISSION_LISTEN": admission_address,
            "OMNISERVE_ADMISSION_ADDRESS": admission_address,
            "OMNISERVE_LLM_LISTEN": address,
            "OMNISERVE_DRAIN_GRACE_S": "2",
            "OMNISERVE_EMBEDDING_GGUF": "none",
            **settings,
        }
        log = folder / "llm.log"
        with running("services.llm", environ, log) as llm:
            pair = LlmPair(folder, address, admission_address, llm, log)
            if not with_admission:
                wait_until(lambda: serving(address), "llm serves", every_s=LOOK_S)
                yield pair
                return
            with running("services.admission", environ, folder / "admission.log"):
                wait_until(
                    lambda: serving(address) and serving(admission_address), "llm and admission serve", every_s=LOOK_S
                )
                yield pair

    return start


@pytest.fixture(scope="session")
def llm_pair(start_llm: "Callable[..., contextmanager[LlmPair]]") -> Iterator[LlmPair]:
    """admission and llm with their defaults, shared by the tests of a session."""
    with start_llm() as pair:
        yield pair


@dataclass
class DiffusionPair:
    """admission, diffusion and perhaps vram, listening on their addresses; the models' files are in `models`."""

    state_dir: Path
    address: str
    admission_address: str
    vram_address: str
    diffusion: "subprocess.Popen[bytes]"
    models: ImageModel
    log: Path

    def channel(self, caller: str = "facade") -> grpc.aio.Channel:
        """Open a channel to diffusion as one of the services."""
        return open_channel(self.address, caller=caller, state_dir=self.state_dir)

    async def engines(self) -> dict[str, diffusion_pb2.EngineStatus]:
        """Return the state of every engine that runs or has failed, by its model's name."""
        async with self.channel() as channel:
            stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)
            status = await stub.GetStatus(diffusion_pb2.GetStatusRequest(), timeout=60)
        return {engine.model: engine for engine in status.engines}

    async def permits(self) -> tuple[int, int]:
        """Return how many permits are held, and how many asks wait."""
        async with open_channel(self.admission_address, caller="facade", state_dir=self.state_dir) as channel:
            stub = admission_pb2_grpc.AdmissionServiceStub(channel)
            pools = (await stub.GetStatus(admission_pb2.GetStatusRequest(), timeout=60)).pools
        return sum(pool.permits for pool in pools), sum(pool.waiting for pool in pools)

    async def leases(self) -> list[vram_pb2.LeaseState]:
        """Return what is leased."""
        async with open_channel(self.vram_address, caller="facade", state_dir=self.state_dir) as channel:
            return list((await vram_pb2_grpc.VramServiceStub(channel).GetState(vram_pb2.GetStateRequest())).leases)

    async def idle(self) -> None:
        """Wait until no request and no permit is left."""
        async with asyncio.timeout(120):
            while True:
                engines = (await self.engines()).values()
                left = [number for each in engines for number in (each.active_requests, each.waiting_requests)]
                if not any((*left, *await self.permits())):
                    return
                await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def image_models(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """A small image model with random weights, its adapter, and an upscaler."""
    return image_models_files.make(tmp_path_factory.mktemp("image-models"))


@pytest.fixture(scope="session")
def start_diffusion(
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
    wait_until: Callable[..., None],
    image_models: ImageModel,
) -> "Callable[..., contextmanager[DiffusionPair]]":
    """Return what starts a pair of admission and diffusion with further settings."""

    @contextmanager
    def start(*, with_vram: bool = False, **settings: str) -> Iterator[DiffusionPair]:
        folder = tmp_path_factory.mktemp("diffusion")
        admission_address, address, vram_address = (f"127.0.0.1:{port}" for port in free_ports(3))
        ensure_token(folder, "facade")
        environ = {
            "OMNISERVE_STATE_DIR": str(folder),
            "OMNISERVE_ADMISSION_LISTEN": admission_address,
            "OMNISERVE_ADMISSION_ADDRESS": admission_address,
            "OMNISERVE_DIFFUSION_LISTEN": address,
            "OMNISERVE_VRAM_LISTEN": vram_address,
            "OMNISERVE_VRAM_ADDRESS": vram_address,
            "OMNISERVE_DIFFUSION_LEASE_MEMORY": str(int(with_vram)),
            "OMNISERVE_DRAIN_GRACE_S": "2",
            **image_models.settings,
            "OMNISERVE_LORA_DIR": str(image_models.lora.parent),
            "OMNISERVE_DIFFUSION_NATIVE_TAP": str(build_tap()),
            **settings,
        }
        log = folder / "diffusion.log"
        with (
            running("services.diffusion", environ, log) as diffusion,
            running("services.admission", environ, folder / "admission.log"),
            running("services.vram", environ, folder / "vram.log") if with_vram else nullcontext(),
        ):
            addresses = [address, admission_address, *([vram_address] if with_vram else [])]
            wait_until(
                lambda: all(serving(each) for each in addresses), "diffusion, admission and vram serve", every_s=LOOK_S
            )
            yield DiffusionPair(folder, address, admission_address, vram_address, diffusion, image_models, log)

    return start


@pytest.fixture(scope="session")
def draft_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 cut to its first four blocks: as a file and in memory much smaller than the whole."""
    return cut(default_path(), tmp_path_factory.mktemp("draft") / "draft.gguf", 4)


@pytest.fixture(scope="session")
def load_model() -> "Callable[[Path], Model]":
    """Return what loads a model file into this process."""
    from tests.fixtures.engine import load  # noqa: PLC0415 - few tests need llama.cpp, which takes a second

    return load


@pytest.fixture(scope="session")
def whole_model(load_model: "Callable[[Path], Model]") -> "Model":
    """SmolLM2 in this process: where it matters what answers say."""
    return load_model(default_path())


@pytest.fixture(scope="session")
def small_model(load_model: "Callable[[Path], Model]", draft_gguf: Path) -> "Model":
    """SmolLM2 cut to its first four blocks, in this process: where it matters how answers come about, not what they say."""
    return load_model(draft_gguf)
