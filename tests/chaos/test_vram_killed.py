"""The broker is killed again and again under load: no live lease is lost, nothing is promised twice.

`KILLS` says how often; `make chaos` kills 200 times.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from services.kit.channels import open_channel
from tests.fixtures import nvml
from tests.fixtures.nvml import StandIn

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("KILLS", "8"))
CAPACITY = 1000
TENANTS = 8
AWAY = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}


class Broker:
    """A vram process that can be killed and started again."""

    def __init__(self, folder: Path, library: Path, port: int) -> None:
        shown = StandIn(folder / "nvml", [("Test GPU", CAPACITY, CAPACITY)]).show()
        self.address = f"127.0.0.1:{port}"
        self.folder = folder
        self.environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}",
            "OMNISERVE_STATE_DIR": str(folder),
            "OMNISERVE_VRAM_LISTEN": self.address,
            "OMNISERVE_VRAM_KEEP_FREE_MB": "0",
            **shown.environ(library),
        }
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.vram", cwd=ROOT, env=self.environ, stderr=asyncio.subprocess.DEVNULL
        )

    async def kill(self) -> None:
        assert self.process is not None
        assert self.process.returncode is None, "it ended by itself"
        self.process.kill()
        await self.process.wait()


class Load:
    """Tenants that lease, renew and release as fast as they can, and what they hold by what they were told."""

    def __init__(self, stub: vram_pb2_grpc.VramServiceStub) -> None:
        self.stub = stub
        self.held: dict[str, int] = {}
        self.answers = 0
        self.stopping = False

    async def answer(self, call, request):
        """Call until somebody answers."""
        while True:
            try:
                found = await call(request, timeout=60, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY:
                    raise
                await asyncio.sleep(0.01)
            else:
                self.answers += 1
                return found

    async def tenant(self, name: str) -> None:
        chance = random.Random(name)
        asks = 0
        while not self.stopping:
            asks += 1
            item = pb.LeaseItem(device="gpu0", size_mib=chance.randint(50, 400))
            request = pb.LeaseRequest(tenant=name, items=[item], ttl_s=3600, idempotency_key=f"{asks}")
            lease = await self.answer(self.stub.Lease, request)
            if not lease.granted:
                assert lease.denied.reason in {pb.DENIAL_REASON_NO_HEADROOM, pb.DENIAL_REASON_DRIVER_UNKNOWN}, lease
                continue
            self.held[lease.lease_id] = item.size_mib
            assert sum(self.held.values()) <= CAPACITY, "the same bytes were promised twice"
            for _ in range(chance.randint(0, 4)):
                # A lease that was lost is refused as unknown, which ends the test.
                await self.answer(self.stub.Renew, pb.RenewRequest(lease_id=lease.lease_id))
            del self.held[lease.lease_id]
            await self.answer(self.stub.Release, pb.ReleaseRequest(lease_id=lease.lease_id))


@pytest.mark.timeout(3600)
async def test_no_kill_loses_a_live_lease_or_promises_anything_twice(tmp_path, free_ports):
    library = tmp_path / "library"
    library.mkdir()
    broker = Broker(tmp_path, nvml.build(library), free_ports(1)[0])
    chance = random.Random(11)
    await broker.start()
    async with open_channel(broker.address, caller="llm", state_dir=tmp_path) as channel:
        load = Load(vram_pb2_grpc.VramServiceStub(channel))
        async with asyncio.TaskGroup() as tenants:
            for number in range(TENANTS):
                tenants.create_task(load.tenant(f"tenant{number}"))
            kept = pb.LeaseRequest(tenant="kept", items=[pb.LeaseItem(device="gpu0", size_mib=100)], ttl_s=3600)
            kept.idempotency_key = "kept"
            while not (lease := await load.answer(load.stub.Lease, kept)).granted:
                pass
            load.held[lease.lease_id] = 100
            for _ in range(KILLS):
                enough = load.answers + chance.randint(1, 200)
                while load.answers < enough:
                    await asyncio.sleep(0.002)
                await broker.kill()
                await broker.start()
                renewed = await load.answer(load.stub.Renew, pb.RenewRequest(lease_id=lease.lease_id))
                assert renewed.lease.items[0].size_mib == 100
            load.stopping = True
        state = await load.answer(load.stub.GetState, pb.GetStateRequest())
        assert [each.tenant for each in state.leases] == ["kept"], "what was released is gone, and nothing was made up"
        assert not state.HasField("settling_ms"), "no kill left a file that cannot be read"
        assert state.counters.granted_total > KILLS
    await broker.kill()
