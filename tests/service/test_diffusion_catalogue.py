"""Several picture models of omniserve.yaml, served and followed while they run."""

import asyncio

import grpc
import pytest

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.kit.errors import Reason, from_rpc_error

LIMIT_S = 240


def entry(models, name: str, steps: int) -> str:
    return (
        f"  - {{name: {name}, kind: image, aliases: [{name}-alias], steps: {steps}, width: 64, height: 64, "
        f"diffusion_model: {models.diffusion}, llm: {models.llm}, taesd: {models.taesd}}}\n"
    )


async def test_models_of_the_file_are_served_by_name_and_followed(start_diffusion, image_models, tmp_path):
    file = tmp_path / "omniserve.yaml"
    file.write_text("models:\n" + entry(image_models, "quick", 1) + entry(image_models, "careful", 2))
    nothing = dict.fromkeys(("OMNISERVE_SD_DIFFUSION_MODEL", "OMNISERVE_SD_LLM", "OMNISERVE_SD_TAESD"), "")
    with start_diffusion(**nothing, OMNISERVE_CONFIG=str(file)) as pair:
        async with pair.channel() as channel:
            stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)

            async def done(model: str) -> pb.Done:
                options = pb.ImageOptions(
                    model=model, seed=1, encoding=media_pb2.ImageEncoding(format=media_pb2.IMAGE_FORMAT_RAW)
                )
                call = stub.GenerateImage(pb.GenerateImageRequest(prompt="x", options=options), timeout=LIMIT_S)
                return [event async for event in call][-1].done

            async def names() -> list[str]:
                return [each.name for each in (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models]

            assert (await names())[:2] == ["quick", "careful"]
            told = await done("")
            assert (told.model, told.steps) == ("quick", 1)
            told = await done("careful-alias")
            assert (told.model, told.steps) == ("careful", 2)
            assert set(await pair.engines()) == {"quick", "careful"}

            file.write_text("models:\n" + entry(image_models, "careful", 3))
            async with asyncio.timeout(60):
                while "quick" in await names():
                    await asyncio.sleep(0.1)
            assert (await done("")).steps == 3
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await done("quick")
            assert from_rpc_error(caught.value).reason is Reason.NOT_FOUND

            file.write_text("models:\n  - {name: careful, kind: image, stps: 3}\n")  # refused: what was served goes on
            await asyncio.sleep(1.5)
            assert (await done("careful")).steps == 3
            await pair.idle()
