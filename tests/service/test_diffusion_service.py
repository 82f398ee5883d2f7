"""The diffusion service on the real engine, over real gRPC, with a model of random weights. Pictures are small and steps few."""

import asyncio
import io
import os
import signal

import grpc
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.kit.channels import call_metadata
from services.kit.errors import DomainError, Reason, from_rpc_error

LIMIT_S = 240
RAW = media_pb2.ImageEncoding(format=media_pb2.IMAGE_FORMAT_RAW)
PNG = media_pb2.ImageEncoding(format=media_pb2.IMAGE_FORMAT_PNG)


@pytest.fixture(scope="module")
def pair(start_diffusion):
    with start_diffusion(OMNISERVE_SD_MAX_BATCH="2") as running:
        yield running


@pytest.fixture
async def stub(pair):
    async with pair.channel() as channel:
        yield diffusion_pb2_grpc.DiffusionServiceStub(channel)
    await pair.idle()


def asked(prompt: str = "a red cat", **options) -> pb.GenerateImageRequest:
    given = {"width_px": 64, "height_px": 64, "steps": 2, "seed": 42, "encoding": RAW} | options
    return pb.GenerateImageRequest(prompt=prompt, options=pb.ImageOptions(**given))


async def collect(call) -> list:
    return [event async for event in call]


def images(events) -> list[pb.Image]:
    return [event.image for event in events if event.WhichOneof("event") == "image"]


async def made(stub, request) -> list[pb.Image]:
    return images(await collect(stub.GenerateImage(request, timeout=LIMIT_S)))


async def refusal(call) -> DomainError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return from_rpc_error(caught.value)


def picture(width: int = 64, height: int = 64, mode: str = "RGB") -> bytes:
    colours = {"RGB": (200, 40, 90), "RGBA": (200, 40, 90, 0), "L": 255}
    file = io.BytesIO()
    Image.new(mode, (width, height), colours[mode]).save(file, "PNG")
    return file.getvalue()


def given(data: bytes) -> media_pb2.ImageInput:
    return media_pb2.ImageInput(encoded=data)


async def test_a_picture_comes_with_its_steps_and_one_done_and_again_byte_for_byte(stub):
    events = await collect(stub.GenerateImage(asked(), timeout=LIMIT_S))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[-2:] == ["image", "done"]
    assert "step" in kinds
    denoising = [event.step for event in events if event.step.phase == pb.PHASE_DENOISING]
    assert denoising[-1].step == denoising[-1].steps == 2
    (image,) = images(events)
    assert (image.image.width_px, image.image.height_px, image.seed) == (64, 64, 42)
    assert len(image.image.data) == 64 * 64 * 3
    assert image.denoise_calls == 2
    done = events[-1].done
    assert (done.model, done.images, done.steps, done.sampler) == ("tiny-image", 1, 2, "euler")
    (again,) = await made(stub, asked())
    assert again.image.data == image.image.data


async def test_pictures_of_a_batch_equal_lone_runs_with_the_seeds_that_follow(stub):
    batch = await made(stub, asked(n=3))
    assert [image.index for image in batch] == [0, 1, 2]
    assert [image.seed for image in batch] == [42, 43, 44]
    (second,) = await made(stub, asked(seed=43))
    (third,) = await made(stub, asked(seed=44))
    assert [image.image.data for image in batch[1:]] == [second.image.data, third.image.data]


async def test_who_wants_no_steps_hears_of_the_pictures_alone(stub):
    events = await collect(stub.GenerateImage(asked(without_steps=True), timeout=LIMIT_S))
    kinds = [event.WhichOneof("event") for event in events]
    assert [kind for kind in kinds if kind != "loading"] == ["image", "done"]


async def test_without_a_seed_one_is_chosen_and_reported_and_makes_the_same_picture(stub):
    request = asked()
    request.options.ClearField("seed")
    (image,) = await made(stub, request)
    (again,) = await made(stub, asked(seed=image.seed))
    assert again.image.data == image.image.data


async def test_previews_come_before_their_picture(stub):
    events = await collect(stub.GenerateImage(asked(steps=4, partial_images=2, encoding=PNG), timeout=LIMIT_S))
    previews = [event.preview for event in events if event.WhichOneof("event") == "preview"]
    assert [preview.partial_index for preview in previews] == list(range(len(previews)))
    assert 1 <= len(previews) <= 2
    assert all(Image.open(io.BytesIO(preview.image.data)).format == "PNG" for preview in previews)


async def test_the_parameters_are_written_into_the_file(stub):
    (image,) = await made(stub, asked(negative_prompt="blur", encoding=PNG))
    text = Image.open(io.BytesIO(image.image.data)).info["parameters"]
    assert text.startswith("a red cat\nNegative prompt: blur\nSteps: 2, ")
    assert "Seed: 42" in text
    plain = media_pb2.ImageEncoding(format=media_pb2.IMAGE_FORMAT_PNG, embed_parameters=False)
    (bare,) = await made(stub, asked(negative_prompt="blur", encoding=plain))
    assert "parameters" not in Image.open(io.BytesIO(bare.image.data)).info


async def test_a_size_is_rounded_up_as_the_engine_needs_it_and_reported(stub):
    (image,) = await made(stub, asked(width_px=60, height_px=50))
    assert (image.image.width_px, image.image.height_px) == (64, 56)


async def test_a_tag_in_a_prompt_is_removed_and_never_obeyed(stub, pair):
    (plain,) = await made(stub, asked())
    (tagged,) = await made(stub, asked(f"a red cat<lora:{pair.models.lora}:1>"))
    assert tagged.image.data == plain.image.data


async def test_an_adapter_changes_its_request_alone(stub, pair):
    (before,) = await made(stub, asked())
    lora = pb.Lora(catalogue=pb.CatalogueLora(lora_id="tiny-lora"))
    (adapted,) = await made(stub, asked(loras=[lora]))
    by_path = pb.Lora(path=str(pair.models.lora), scale=1.0)
    (operators,) = await made(stub, asked(loras=[by_path]))
    (after,) = await made(stub, asked())
    assert adapted.image.data != before.image.data
    assert operators.image.data == adapted.image.data
    assert after.image.data == before.image.data
    assert (adapted.prompts_recalled, operators.prompts_recalled) == (0, 0)  # adapters change the text encoders too
    assert after.prompts_recalled > 0


async def test_an_adapter_for_another_model_is_refused_instead_of_passed_over(stub, pair, tmp_path):
    other = tmp_path / "other.safetensors"
    renamed = {name.replace("blocks_0", "blocks_77"): each for name, each in load_file(pair.models.lora).items()}
    save_file(renamed, other)
    error = await refusal(stub.GenerateImage(asked(loras=[pb.Lora(path=str(other))]), timeout=LIMIT_S))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "options.loras[0]")


async def test_an_edit_starts_from_its_picture_and_a_mask_keeps_what_it_does_not_paint(stub):
    request = pb.EditImageRequest(prompt="a red cat", images=[given(picture())], options=asked().options, strength=0.5)
    request.options.steps = 4
    (edited,) = images(await collect(stub.EditImage(request, timeout=LIMIT_S)))
    request.mask.CopyFrom(given(picture(mode="L")))
    (everywhere,) = images(await collect(stub.EditImage(request, timeout=LIMIT_S)))
    (made_up,) = await made(stub, asked(steps=4))
    assert edited.image.data == everywhere.image.data
    assert edited.image.data != made_up.image.data


async def test_a_variation_needs_no_text(stub):
    request = pb.VaryImageRequest(image=given(picture()), options=asked().options)
    (image,) = images(await collect(stub.VaryImage(request, timeout=LIMIT_S)))
    assert len(image.image.data) == 64 * 64 * 3


async def test_a_picture_is_enlarged_tile_by_tile_and_keeps_its_transparency(stub):
    request = pb.UpscaleImageRequest(image=given(picture(40, 24, "RGBA")), tile_px=32, encoding=PNG)
    events = await collect(stub.UpscaleImage(request, timeout=LIMIT_S))
    (image,) = images(events)
    assert (image.image.width_px, image.image.height_px, image.image.channels) == (160, 96, 4)
    assert Image.open(io.BytesIO(image.image.data)).getextrema()[3] == (0, 0)
    tiles = [event.step for event in events if event.step.phase == pb.PHASE_UPSCALING]
    assert (tiles[-1].step, tiles[-1].steps) == (2, 2)
    request.factor = 2
    (smaller,) = images(await collect(stub.UpscaleImage(request, timeout=LIMIT_S)))
    assert (smaller.image.width_px, smaller.image.height_px) == (80, 48)


BAD = {
    "steps": ({"steps": 0}, "options.steps"),
    "too many steps": ({"steps": 151}, "options.steps"),
    "guidance": ({"guidance": 101.0}, "options.guidance"),
    "seed": ({"seed": -1}, "options.seed"),
    "number": ({"n": 11}, "options.n"),
    "sampler": ({"sampler": "magic"}, "options.sampler"),
    "scheduler": ({"scheduler": "never"}, "options.scheduler"),
    "width": ({"width_px": 4}, "options.width_px"),
    "pixels": ({"width_px": 8192, "height_px": 8192}, "options.width_px"),
    "previews": ({"partial_images": 4}, "options.partial_images"),
    "quality": ({"encoding": media_pb2.ImageEncoding(quality=101)}, "options.encoding.quality"),
    "background": ({"background": pb.BACKGROUND_TRANSPARENT}, "options.background"),
    "adapter": (
        {"loras": [pb.Lora(catalogue=pb.CatalogueLora(lora_id="../tiny-lora"))]},
        "options.loras[0].catalogue.lora_id",
    ),
    "no adapter": ({"loras": [pb.Lora(catalogue=pb.CatalogueLora(lora_id="absent"))]}, "options.loras[0]"),
    "model": ({"model": "absent"}, "model"),
    "upscaler": ({"model": "tiny-x4"}, "model"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
async def test_what_is_wrong_is_refused_naming_the_field_before_anything_is_waited_for(stub, case):
    options, field = case
    error = await refusal(stub.GenerateImage(asked(**options), timeout=LIMIT_S))
    assert error.reason in {Reason.INVALID_REQUEST, Reason.UNSUPPORTED, Reason.NOT_FOUND}
    assert error.field == field


async def test_a_picture_that_is_none_is_refused_naming_it(stub):
    request = pb.EditImageRequest(prompt="x", images=[given(b"no picture")], options=asked().options)
    assert (await refusal(stub.EditImage(request, timeout=LIMIT_S))).field == "images"
    request = pb.EditImageRequest(
        prompt="x", images=[given(picture())], mask=given(picture(32, 32)), options=asked().options
    )
    assert (await refusal(stub.EditImage(request, timeout=LIMIT_S))).field == "mask"


async def test_a_path_of_an_adapter_is_for_the_operator_alone(pair):
    async with pair.channel("envoy-public") as channel:
        stub = diffusion_pb2_grpc.DiffusionServiceStub(channel)
        error = await refusal(stub.GenerateImage(asked(loras=[pb.Lora(path=str(pair.models.lora))]), timeout=LIMIT_S))
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "options.loras[0].path")


async def test_a_caller_that_leaves_frees_engine_and_permit_within_a_step(stub, pair):
    call = stub.GenerateImage(asked(steps=150), timeout=LIMIT_S)
    async for event in call:
        if event.step.phase == pb.PHASE_DENOISING and event.step.step >= 2:
            break
    call.cancel()
    await pair.idle()
    engine = (await pair.engines())["tiny-image"]
    assert engine.cancelled_total >= 1
    assert engine.crashes_total == 0
    assert engine.state == pb.MODEL_STATE_READY


async def test_the_permit_is_held_until_the_engine_has_ended_what_was_cancelled(stub, pair):
    call = stub.GenerateImage(asked(steps=150), timeout=LIMIT_S)
    async for event in call:
        if event.step.phase == pb.PHASE_DENOISING and event.step.step >= 2:
            break
    before = (await pair.engines())["tiny-image"]
    os.kill(before.host_pid, signal.SIGSTOP)  # in the middle of a step
    try:
        call.cancel()
        async with asyncio.timeout(60):
            while (await pair.engines())["tiny-image"].cancelled_total == before.cancelled_total:
                await asyncio.sleep(0.02)
        for _ in range(20):
            await asyncio.sleep(0.02)
            held, _ = await pair.permits()
            assert held > 0
    finally:
        os.kill(before.host_pid, signal.SIGCONT)
    await pair.idle()
    assert (await pair.engines())["tiny-image"].host_pid == before.host_pid


async def test_who_may_not_wait_is_refused_while_another_draws(stub, pair):
    call = stub.GenerateImage(asked(steps=150), timeout=LIMIT_S)
    async for event in call:
        if event.step.phase == pb.PHASE_DENOISING:
            break
    error = await refusal(stub.GenerateImage(asked(may_wait=False), timeout=LIMIT_S))
    assert error.reason is Reason.SATURATED
    call.cancel()
    await pair.idle()


async def test_a_repeat_with_teleport_is_the_finished_picture(stub):
    request = asked("a repeat", teleport=pb.Teleport(start_step=1))
    request.options.ClearField("seed")
    (first,) = await made(stub, request)
    (again,) = await made(stub, request)
    assert first.replay == pb.REPLAY_LAYER_UNSPECIFIED
    assert again.replay == pb.REPLAY_LAYER_RESULT
    assert (again.image.data, again.seed, again.denoise_calls) == (first.image.data, first.seed, 0)
    assert again.teleport_key == first.teleport_key


async def test_another_format_resumes_at_the_step_with_the_same_pixels(stub):
    teleport = pb.Teleport(start_step=3)
    (prime,) = await made(stub, asked("in two formats", steps=4, teleport=teleport))
    (replay,) = await made(stub, asked("in two formats", steps=4, teleport=teleport, encoding=PNG))
    assert (prime.replay, prime.denoise_calls) == (pb.REPLAY_LAYER_UNSPECIFIED, 4)
    assert (replay.replay, replay.resumed_at_step, replay.denoise_calls) == (pb.REPLAY_LAYER_LATENT, 3, 1)
    assert Image.open(io.BytesIO(replay.image.data)).convert("RGB").tobytes() == prime.image.data
    (plain,) = await made(stub, asked("in two formats", steps=4))
    assert plain.image.data == prime.image.data


async def test_the_operator_sees_and_empties_the_caches(stub, pair):
    await made(stub, asked("to be forgotten", teleport=pb.Teleport()))
    async with pair.channel() as channel:
        admin = diffusion_pb2_grpc.DiffusionAdminServiceStub(channel)
        status = (await admin.GetTeleportStatus(pb.GetTeleportStatusRequest(), timeout=60)).teleport
        assert status.native
        assert {layer.layer: layer.available for layer in status.layers} == {
            pb.TELEPORT_LAYER_RESULT: True,
            pb.TELEPORT_LAYER_LATENT: True,
            pb.TELEPORT_LAYER_CONDITION: True,
        }
        gone = await admin.ClearTeleport(pb.ClearTeleportRequest(), timeout=60)
        assert gone.entries >= 1
    (image,) = await made(stub, asked("to be forgotten", teleport=pb.Teleport()))
    assert image.replay == pb.REPLAY_LAYER_UNSPECIFIED


async def test_an_encoded_prompt_is_recalled_with_the_same_bytes_until_the_operator_clears_it(stub, pair):
    async def forget() -> pb.ClearTeleportResponse:
        async with pair.channel() as channel:
            admin = diffusion_pb2_grpc.DiffusionAdminServiceStub(channel)
            layers = [pb.TELEPORT_LAYER_CONDITION]
            return await admin.ClearTeleport(pb.ClearTeleportRequest(layers=layers), timeout=60)

    def order(seed: int, prompt: str = "a boat", **more) -> pb.GenerateImageRequest:
        return asked(prompt, seed=seed, guidance=4.0, negative_prompt="fog", **more)

    async def status() -> pb.TeleportLayerStatus:
        told = (await stub.GetStatus(pb.GetStatusRequest(), timeout=60)).teleport
        return next(each for each in told.layers if each.layer == pb.TELEPORT_LAYER_CONDITION)

    await forget()
    before = await status()
    assert (before.entries, before.size_bytes) == (0, 0)
    (encoded,) = await made(stub, order(1))
    (recalled,) = await made(stub, order(2))
    assert (encoded.prompts_recalled, recalled.prompts_recalled) == (0, 2)
    kept = await status()
    assert (kept.entries, kept.hits_total - before.hits_total, kept.misses_total - before.misses_total) == (2, 2, 2)

    (other,) = await made(stub, order(2, "a ship"))  # the same negative prompt
    (swapped,) = await made(stub, asked("fog", seed=2, guidance=4.0, negative_prompt="a boat"))
    (wider,) = await made(stub, order(2, width_px=128))
    assert (other.prompts_recalled, swapped.prompts_recalled, wider.prompts_recalled) == (1, 0, 0)

    gone = await forget()
    assert gone.entries == (await status()).misses_total - before.misses_total
    assert gone.size_bytes > kept.size_bytes
    (again,) = await made(stub, order(2))
    assert again.prompts_recalled == 0
    assert again.image.data == recalled.image.data
    assert len({each.image.data for each in (encoded, recalled, other, swapped)}) == 4


async def test_the_caller_s_tier_and_name_reach_admission(stub):
    metadata = call_metadata(client="alice", tier="paid", request_id="r-1")
    events = await collect(stub.GenerateImage(asked(), metadata=metadata, timeout=LIMIT_S))
    assert events[-1].HasField("done")


async def test_a_killed_engine_is_one_clean_error_and_the_next_request_works(stub, pair):
    call = stub.GenerateImage(asked(steps=150), timeout=LIMIT_S)
    async for event in call:
        if event.step.phase == pb.PHASE_DENOISING:
            break
    os.kill((await pair.engines())["tiny-image"].host_pid, signal.SIGKILL)
    error = await refusal(call)
    assert error.reason is Reason.ENGINE_FAILED
    assert "SIGKILL" in error.message
    await asyncio.sleep(0)
    assert len(await made(stub, asked())) == 1
    await pair.idle()
    assert (await pair.engines())["tiny-image"].crashes_total == 1


async def test_models_are_listed_unloaded_and_loaded(stub, pair):
    models = {model.name: model for model in (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models}
    assert models["tiny-image"].family == "ovis-image"
    assert models["tiny-x4"].factor == 4
    async with pair.channel() as channel:
        admin = diffusion_pb2_grpc.DiffusionAdminServiceStub(channel)
        gone = await admin.UnloadModel(pb.UnloadModelRequest(), timeout=LIMIT_S)
        assert gone.model.state == pb.MODEL_STATE_AVAILABLE
        back = await admin.LoadModel(pb.LoadModelRequest(), timeout=LIMIT_S)
        assert back.model.state == pb.MODEL_STATE_READY
