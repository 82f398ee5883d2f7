"""Two models that do not fit together in what a broker has: real engines, a real broker, killed meanwhile.

The device is a stand-in for NVIDIA's driver, so how much there is does not depend on the machine.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from omniserve.vram.v1 import vram_pb2, vram_pb2_grpc
from services.kit.channels import open_channel
from services.kit.errors import Reason, from_rpc_error
from tests.fixtures import nvml
from tests.fixtures.nvml import StandIn

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = int(os.environ.get("LEASE_REQUESTS", "40"))
"""`make chaos` asks 200 times."""
CLIENTS = 8
KILLS = 3
CAPACITY_MIB = 100
TTL_S = 60


@dataclass
class Scene:
    """llm that leases from a broker which can be killed."""

    pair: object
    address: str
    environ: dict[str, str]
    process: "subprocess.Popen[bytes]"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.vram"], cwd=ROOT, env=self.environ, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        assert self.process.poll() is None, "the broker ended by itself"
        self.process.kill()
        self.process.wait()

    def log(self) -> list[dict]:
        lines = self.pair.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def account(self) -> list[int]:
        """Return how much was held after each lease and each release."""
        held = {"memory charged": 1, "memory credited": -1}
        totals = [0]
        for line in self.log():
            if line["event"] in held:
                totals.append(totals[-1] + held[line["event"]] * line["size_mib"])
        return totals

    def loads(self) -> int:
        return sum(line["event"] == "memory charged" for line in self.log())

    def broker(self):
        return open_channel(self.address, caller="cli", state_dir=self.pair.state_dir)


@pytest.fixture(scope="module")
def scene(start_llm, draft_gguf, tmp_path_factory, free_ports) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("leases")
    library = folder / "library"
    library.mkdir()
    nvml.build(library)
    shown = StandIn(folder / "nvml", [("Test GPU", CAPACITY_MIB, CAPACITY_MIB)]).show()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    broken = folder / "broken.gguf"
    # Its words are there, so a request gets as far as the load, and a tensor is missing.
    broken.write_bytes(draft_gguf.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"))
    paths = {"one": draft_gguf, "two": draft_gguf, "broken": broken}
    models = [{"name": name, "path": str(path), "ctx": 512, "contexts": 8} for name, path in paths.items()]
    (folder / "omniserve.yaml").write_text(yaml.safe_dump({"models": models}))
    settings = {
        "OMNISERVE_CONFIG": str(folder / "omniserve.yaml"),
        "OMNISERVE_VRAM_ADDRESS": address,
        "OMNISERVE_LLM_LEASE_MEMORY": "1",
        "OMNISERVE_LLM_LEASE_DEVICE": "gpu0",
        "OMNISERVE_LLM_TURN_S": "1",
        "OMNISERVE_LLM_LOAD_WAIT_S": "250",  # a load takes a second here, and half a minute on a crowded machine
        "OMNISERVE_LLM_BATCH": "64",
        "OMNISERVE_LLM_UBATCH": "64",
    }
    with start_llm(**settings) as pair:
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
            "OMNISERVE_STATE_DIR": str(pair.state_dir),
            "OMNISERVE_VRAM_LISTEN": address,
            "OMNISERVE_VRAM_KEEP_FREE_MB": "0",
            "OMNISERVE_VRAM_LEASE_TTL_S": str(TTL_S),
            **shown.environ(library),
        }
        found = Scene(pair, address, environ, None)  # type: ignore[arg-type]
        found.start()
        yield found
        found.kill()


def chat(model: str) -> pb.ChatRequest:
    return pb.ChatRequest(
        model=model,
        messages=[pb.Message(role="user", content=[pb.ContentPart(text="Hello")])],
        options=pb.Options(sampling=pb.Sampling(temperature=0), limits=pb.Limits(max_tokens=2, ignore_eos=True)),
    )


async def answered(stub, model: str) -> str:
    return [event async for event in stub.Chat(chat(model), timeout=280)][-1].done.model


@pytest.mark.timeout(1800)
async def test_two_models_that_do_not_fit_together_serve_everybody_by_turns_while_the_broker_is_killed(scene):
    served: list[str] = []

    async def client(stub, number: int) -> None:
        for turn in range(REQUESTS // CLIENTS):
            model = ("one", "two")[(number + turn) % 2]
            served.append(await answered(stub, model))
            assert served[-1] == model

    async with scene.pair.channel() as channel, asyncio.TaskGroup() as group:
        stub = llm_pb2_grpc.LlmServiceStub(channel)
        for number in range(CLIENTS):
            group.create_task(client(stub, number))
        chance = random.Random(5)
        for kill in range(KILLS):
            while len(served) < (kill + chance.random()) * REQUESTS / (KILLS + 1):
                await asyncio.sleep(0.02)
            await asyncio.to_thread(scene.kill)
            await asyncio.sleep(chance.random())
            scene.start()
    assert len(served) == REQUESTS // CLIENTS * CLIENTS
    assert max(scene.account()) <= CAPACITY_MIB, "both were there at once"
    assert scene.loads() <= REQUESTS // 2, "requests for the model that is there are served together"
    text = scene.pair.log.read_text()
    assert "out of memory" not in text
    assert "could not be loaded" not in text


async def test_a_model_that_idles_gives_its_memory_to_another_process_and_comes_back_when_it_may(scene):
    async with scene.pair.channel() as channel, scene.broker() as broker:
        stub, vram = llm_pb2_grpc.LlmServiceStub(channel), vram_pb2_grpc.VramServiceStub(broker)
        assert await answered(stub, "one") == "one"
        item = vram_pb2.LeaseItem(device="gpu0", size_mib=90)
        ask = vram_pb2.LeaseRequest(tenant="trainer", items=[item], reclaim=True, wait_ms=60_000, ttl_s=600)
        foreign = await vram.Lease(ask, timeout=100, wait_for_ready=True)
        assert foreign.granted, "nobody used the model"
        assert {each.state for each in (await stub.ListModels(pb.ListModelsRequest())).models} == {
            pb.MODEL_STATE_AVAILABLE
        }
        waiting = asyncio.ensure_future(answered(stub, "two"))
        async with asyncio.timeout(60):
            while not (await vram.GetState(vram_pb2.GetStateRequest())).denials:
                await asyncio.sleep(0.05)
        assert not waiting.done()
        await vram.Release(vram_pb2.ReleaseRequest(lease_id=foreign.lease_id))
        assert await waiting == "two"
        state = await vram.GetState(vram_pb2.GetStateRequest())
        assert state.counters.ended_total["LEASE_END_RECLAIMED"] == 1
        assert [(each.tenant, each.purpose) for each in state.leases] == [("llm", "two")]


async def test_a_load_that_fails_gives_its_memory_back_and_who_left_for_it_is_there_again(scene):
    async with scene.pair.channel() as channel, scene.broker() as broker:
        stub, vram = llm_pb2_grpc.LlmServiceStub(channel), vram_pb2_grpc.VramServiceStub(broker)
        assert await answered(stub, "one") == "one"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await answered(stub, "broken")
        assert from_rpc_error(failed.value).reason is Reason.ENGINE_FAILED
        async with asyncio.timeout(250):
            while True:
                models = {each.name: each for each in (await stub.ListModels(pb.ListModelsRequest())).models}
                if models["one"].state == pb.MODEL_STATE_READY:
                    break
                await asyncio.sleep(0.05)
        state = await vram.GetState(vram_pb2.GetStateRequest(), timeout=60)
        assert [each.purpose for each in state.leases] == ["one"]
        assert state.counters.ended_total["LEASE_END_LOAD_FAILED"] >= 1
