"""Everything that ends an engine: each is one clean error, the next request works, and no permit or lease is left."""

import asyncio
import json
import os
import shutil
import signal
from contextlib import suppress

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.llm.adapters.model_file import default_path

LIMIT_S = 280
NAME = "changing"


def asked(**options) -> pb.GenerateImageRequest:
    given = {
        "width_px": 64,
        "height_px": 64,
        "steps": 2,
        "seed": 42,
        "encoding": media_pb2.ImageEncoding(format=media_pb2.IMAGE_FORMAT_RAW),
    }
    return pb.GenerateImageRequest(prompt="a red cat", options=pb.ImageOptions(**(given | options)))


async def made(stub, request=None) -> list[pb.Image]:
    events = [event async for event in stub.GenerateImage(request or asked(), timeout=LIMIT_S)]
    return [event.image for event in events if event.HasField("image")]


async def refusal(call) -> DomainError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def at_work(stub, **options):
    """Return a call that draws."""
    call = stub.GenerateImage(asked(steps=150, **options), timeout=LIMIT_S)
    async for event in call:
        if event.step.phase == pb.PHASE_DENOISING and event.step.step > 0:
            return call
    raise AssertionError("it ended before it drew")


async def works_again(stub) -> None:
    """Make a picture, as soon as the pause after failed loads is over."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                assert len(await made(stub)) == 1
                return
            await asyncio.sleep(0.5)


def _narrowed(name: str, tensor):
    return np.ascontiguousarray(tensor[:, :-4]) if name.endswith("lora_down.weight") else tensor


def _without_a_type(whole: bytes) -> bytes:
    """Return a safetensors file one of whose tensors does not say its type, which aborts the engine."""
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    del next(each for name, each in header.items() if name != "__metadata__")["dtype"]
    return whole[:8] + json.dumps(header).encode().ljust(size) + whole[8 + size :]


def test_damaged_files_are_clean_errors_and_a_mended_one_serves(start_diffusion, image_models, tmp_path):
    path = tmp_path / f"{NAME}.safetensors"
    whole = image_models.diffusion.read_bytes()
    path.write_bytes(whole[:-1000])

    async def scenario(pair) -> None:
        async with pair.channel() as channel:
            stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)
            error = await refusal(stub.GenerateImage(asked(), timeout=LIMIT_S))
            assert error.reason is Reason.UNSUPPORTED
            assert "truncated: 1000 bytes" in error.message
            (listed,) = [
                model for model in (await stub.ListModels(pb.ListModelsRequest())).models if model.name == NAME
            ]
            assert listed.state == pb.MODEL_STATE_FAILED
            assert "truncated" in listed.failure
            for other in (image_models.upscaler, default_path(), image_models.lora):
                shutil.copyfile(other, path)
                error = await refusal(stub.GenerateImage(asked(), timeout=LIMIT_S))
                assert (error.reason, error.field) == (Reason.UNSUPPORTED, "model")
            path.write_bytes(_without_a_type(whole))
            error = await refusal(stub.GenerateImage(asked(), timeout=LIMIT_S))
            assert (error.reason, error.field) == (Reason.UNSUPPORTED, "model")
            assert await pair.leases() == []
            tensors = load_file(image_models.diffusion)
            narrow = "model.diffusion_model.txt_in.weight"
            tensors[narrow] = np.ascontiguousarray(tensors[narrow][:, :-8])
            save_file(tensors, path)
            error = await refusal(stub.GenerateImage(asked(), timeout=LIMIT_S))
            assert error.reason is Reason.ENGINE_FAILED
            async with asyncio.timeout(LIMIT_S):
                while await pair.leases():  # given back once the dead process's memory is seen to be free
                    await asyncio.sleep(0.1)
            path.write_bytes(whole)
            await works_again(stub)
            await pair.idle()

    with start_diffusion(with_vram=True, OMNISERVE_SD_DIFFUSION_MODEL=str(path)) as pair:
        asyncio.run(scenario(pair))


def test_a_crash_leaves_no_permit_and_no_lease_and_unloading_gives_all_back(start_diffusion, tmp_path):
    async def scenario(pair) -> None:
        async with pair.channel() as channel:
            stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)
            admin = diffusion_pb2_grpc.DiffusionAdminServiceStub(channel)
            call = await at_work(stub)
            (lease,) = await pair.leases()
            assert lease.tenant == "diffusion"
            assert (await pair.engines())["tiny-image"].lease_id == lease.lease_id
            os.kill((await pair.engines())["tiny-image"].host_pid, signal.SIGKILL)
            assert (await refusal(call)).reason is Reason.ENGINE_FAILED
            assert len(await made(stub)) == 1
            # A corrupt adapter never reaches the engine.
            corrupt = tmp_path / "corrupt.safetensors"
            for data in (b"", b"\xff" * 4096, pair.models.lora.read_bytes()[:-100]):
                corrupt.write_bytes(data)
                error = await refusal(stub.GenerateImage(asked(loras=[pb.Lora(path=str(corrupt))]), timeout=LIMIT_S))
                assert (error.reason, error.field) == (Reason.UNSUPPORTED, "options.loras[0]")
            assert (await pair.engines())["tiny-image"].crashes_total == 1
            # One whose shapes are wrong aborts the engine.
            narrow = tmp_path / "narrow.safetensors"
            tensors = load_file(pair.models.lora)
            save_file({name: _narrowed(name, each) for name, each in tensors.items()}, narrow)
            broken = asked(loras=[pb.Lora(path=str(narrow))])
            assert (await refusal(stub.GenerateImage(broken, timeout=LIMIT_S))).reason is Reason.ENGINE_FAILED
            assert len(await made(stub)) == 1
            await pair.idle()
            await admin.UnloadModel(pb.UnloadModelRequest(), timeout=LIMIT_S)
            assert await pair.leases() == []
            assert await pair.engines() == {}

    with start_diffusion(with_vram=True) as pair:
        asyncio.run(scenario(pair))


def test_without_the_native_part_it_says_why_and_the_rest_works(start_diffusion, tmp_path):
    async def scenario(pair) -> None:
        async with pair.channel() as channel:
            stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)
            teleport = asked(teleport=pb.Teleport())
            (first,) = await made(stub, teleport)
            (again,) = await made(stub, teleport)
            assert (again.replay, again.image.data) == (pb.REPLAY_LAYER_RESULT, first.image.data)
            status = (await stub.GetStatus(pb.GetStatusRequest(), timeout=60)).teleport
            assert not status.native
            (latents,) = [layer for layer in status.layers if layer.layer == pb.TELEPORT_LAYER_LATENT]
            assert not latents.available
            assert "not built" in latents.unavailable_reason
            (prompts,) = [layer for layer in status.layers if layer.layer == pb.TELEPORT_LAYER_CONDITION]
            assert (prompts.available, prompts.unavailable_reason) == (False, latents.unavailable_reason)
            assert not again.HasField("prompts_recalled")
            call = await at_work(stub)
            call.cancel()  # nobody can tell the engine, so it is ended
            await pair.idle()
            await works_again(stub)
            # And one that hangs is noticed.
            call = await at_work(stub)
            os.kill((await pair.engines())["tiny-image"].host_pid, signal.SIGSTOP)
            error = await refusal(call)
            assert error.reason is Reason.ENGINE_FAILED
            assert "nothing for" in error.message
            await works_again(stub)
            await pair.idle()

    with start_diffusion(
        OMNISERVE_DIFFUSION_NATIVE_TAP=str(tmp_path / "absent.so"), OMNISERVE_DIFFUSION_STUCK_S="20"
    ) as pair:
        asyncio.run(scenario(pair))


def test_without_a_model_it_serves_and_says_how_to_get_one(start_diffusion):
    async def scenario(pair) -> None:
        async with pair.channel() as channel:
            stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)
            error = await refusal(stub.GenerateImage(asked(), timeout=LIMIT_S))
            assert (error.reason, error.field) == (Reason.NOT_FOUND, "model")
            assert "OMNISERVE_SD_MODEL" in error.message
            error = await refusal(stub.UpscaleImage(pb.UpscaleImageRequest(), timeout=LIMIT_S))
            assert "image" in error.message
            assert not (await stub.ListModels(pb.ListModelsRequest())).models

    nothing = dict.fromkeys(("OMNISERVE_SD_DIFFUSION_MODEL", "OMNISERVE_SD_LLM", "OMNISERVE_SD_TAESD"), "")
    with start_diffusion(**nothing, OMNISERVE_SD_UPSCALER="none") as pair:
        asyncio.run(scenario(pair))
