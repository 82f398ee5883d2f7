"""Between the contract's messages and the values of core: nothing is decided here."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.media.v1 import media_pb2
from services.diffusion.adapters.engine import Pixels, Result
from services.diffusion.core.catalogue import Kind
from services.diffusion.core.options import (
    AskedEncoding,
    AskedLora,
    AskedOptions,
    Encoding,
    Format,
    Options,
)
from services.diffusion.core.teleport import Cache, Finished
from services.diffusion.core.wire import ImageConfig, Progress
from services.diffusion.resident import Resident
from services.diffusion.scene import Given
from services.diffusion.served import MIB, Broken, Served
from services.diffusion.timeline import Timeline
from services.kit.hosts.core.lifecycle import State

STATES: Final[Mapping[State, pb.ModelState.ValueType]] = {
    State.AVAILABLE: pb.MODEL_STATE_AVAILABLE,
    State.LOADING: pb.MODEL_STATE_LOADING,
    State.READY: pb.MODEL_STATE_READY,
    State.UNLOADING: pb.MODEL_STATE_UNLOADING,
    State.FAILED: pb.MODEL_STATE_FAILED,
}
KINDS: Final[Mapping[Kind, pb.ModelKind.ValueType]] = {
    Kind.IMAGE: pb.MODEL_KIND_IMAGE,
    Kind.UPSCALER: pb.MODEL_KIND_UPSCALER,
}
_PHASES: Final[Mapping[str, pb.Phase.ValueType]] = {
    "conditioning": pb.PHASE_CONDITIONING,
    "denoising": pb.PHASE_DENOISING,
    "decoding": pb.PHASE_DECODING,
    "upscaling": pb.PHASE_UPSCALING,
}
_FORMATS: Final[Mapping[int, Format]] = {
    media_pb2.IMAGE_FORMAT_PNG: Format.PNG,
    media_pb2.IMAGE_FORMAT_JPEG: Format.JPEG,
    media_pb2.IMAGE_FORMAT_WEBP: Format.WEBP,
    media_pb2.IMAGE_FORMAT_RAW: Format.RAW,
}
_WRITTEN: Final = {form: number for number, form in _FORMATS.items()}
_PLAIN: Final = (
    "steps",
    "guidance",
    "distilled_guidance",
    "sampler",
    "scheduler",
    "seed",
    "n",
    "may_wait",
    "clip_skip",
    "eta",
    "flow_shift",
    "vae_tiling",
)


def options(message: pb.ImageOptions) -> AskedOptions:
    """Return the options as the caller wrote them."""
    plain = {name: getattr(message, name) for name in _PLAIN if message.HasField(name)}
    has_start = message.HasField("teleport") and message.teleport.HasField("start_step")
    return AskedOptions(
        negative_prompt=message.negative_prompt,
        width=message.width_px if message.HasField("width_px") else None,
        height=message.height_px if message.HasField("height_px") else None,
        loras=tuple(_lora(each) for each in message.loras),
        teleports=message.HasField("teleport"),
        start_step=message.teleport.start_step if has_start else None,
        encoding=encoding(message.encoding),
        previews=message.partial_images,
        transparent=message.background == pb.BACKGROUND_TRANSPARENT,
        **plain,
    )


def _lora(message: pb.Lora) -> AskedLora:
    scale = message.scale if message.HasField("scale") else None
    if message.WhichOneof("source") == "path":
        return AskedLora(path=message.path, scale=scale)
    named = message.catalogue
    return AskedLora(named.lora_id, named.filename if named.HasField("filename") else None, scale=scale)


def encoding(message: media_pb2.ImageEncoding) -> AskedEncoding:
    """Return how the caller wants pictures written."""
    return AskedEncoding(
        format=_FORMATS.get(message.format),
        quality=message.quality if message.HasField("quality") else None,
        effort=message.effort if message.HasField("effort") else None,
        embeds=message.embed_parameters if message.HasField("embed_parameters") else None,
    )


def given(message: media_pb2.ImageInput) -> Given | None:
    """Return a picture as the caller gave it."""
    kind = message.WhichOneof("source")
    if kind is None:
        return None
    if kind == "encoded":
        return message.encoded
    raw = message.raw
    return Pixels(raw.width_px, raw.height_px, raw.channels, raw.samples)


def output(data: bytes, picture: Pixels, written: Encoding) -> media_pb2.ImageOutput:
    """Return a finished picture."""
    channels = 3 if written.format is Format.JPEG else picture.channels
    return media_pb2.ImageOutput(
        data=data,
        format=media_pb2.ImageFormat.ValueType(_WRITTEN[written.format]),
        width_px=picture.width,
        height_px=picture.height,
        channels=channels,
    )


def step(progress: Progress, first: int, *, eta_ms: int | None) -> pb.Step:
    """Return a sign of progress. `first`: the place of the job's first picture."""
    return pb.Step(
        index=first + progress.index,
        phase=_PHASES[progress.phase],
        step=progress.step,
        steps=progress.steps,
        eta_ms=eta_ms,
    )


def recalled(found: Finished, written: Encoding) -> media_pb2.ImageOutput:
    """Return a finished picture that was kept."""
    return output(found.data, Pixels(found.width, found.height, found.channels, b""), written)


class Made(Protocol):
    """What a request has taken."""

    images: int
    inference_ms: int
    sampler: str
    scheduler: str


def done(model: str, used: Options, made: Made, timeline: Timeline) -> pb.Done:
    """Return the end of a request."""
    return pb.Done(
        model=model,
        images=made.images,
        queue_ms=timeline.queue_ms,
        load_ms=timeline.load_ms,
        inference_ms=made.inference_ms,
        steps=used.sampling.steps,
        guidance=used.sampling.guidance,
        sampler=made.sampler,
        scheduler=made.scheduler,
    )


def upscaled(model: str, result: Result, timeline: Timeline) -> pb.Done:
    """Return the end of an upscaling."""
    return pb.Done(
        model=model,
        images=1,
        queue_ms=timeline.queue_ms,
        load_ms=timeline.load_ms,
        inference_ms=result.made.inference_ms,
    )


def model(resident: Resident, *, max_batch: int) -> pb.Model:
    """Return a catalogue entry with its state."""
    served, report = resident.served, resident.host.report
    is_image = served.family is not None
    defaults = served.defaults
    return pb.Model(
        name=served.name,
        aliases=served.entry.aliases,
        kind=KINDS[served.entry.kind],
        state=STATES[report.state],
        capabilities=_capabilities(served),
        family=served.family.name if served.family is not None else "esrgan",
        size_mib=-(-served.size // MIB),
        failure=report.failure if report.state is State.FAILED else None,
        created_unix_s=served.made_unix_s,
        default_width_px=defaults.width if is_image else None,
        default_height_px=defaults.height if is_image else None,
        default_steps=defaults.steps if is_image else None,
        default_guidance=defaults.guidance if is_image else None,
        max_batch=max_batch if is_image else 1,
        factor=None if is_image else served.factor,
        pinned=served.pinned,
    )


def broken(each: Broken) -> pb.Model:
    """Return a catalogue entry that cannot be served."""
    return pb.Model(
        name=each.entry.name,
        aliases=each.entry.aliases,
        kind=KINDS[each.entry.kind],
        state=pb.MODEL_STATE_FAILED,
        failure=each.why,
    )


def _capabilities(served: Served) -> list[pb.Capability.ValueType]:
    if served.family is None:
        return [pb.CAPABILITY_UPSCALE]
    found = [pb.CAPABILITY_TEXT_TO_IMAGE, pb.CAPABILITY_IMAGE_TO_IMAGE, pb.CAPABILITY_INPAINT, pb.CAPABILITY_LORA]
    if served.family.edits:
        found.append(pb.CAPABILITY_REFERENCES)
    if "control_net" in served.parts:
        found.append(pb.CAPABILITY_CONTROL)
    return found


def status(resident: Resident, *, active: int, idle_ms: int | None) -> pb.EngineStatus:
    """Return the state of a model's engine."""
    report, counters = resident.engine.report, resident.engine.counters
    return pb.EngineStatus(
        model=resident.name,
        state=STATES[report.state],
        host_pid=report.pid,
        placement=_placement(resident),
        active_requests=active,
        waiting_requests=counters.waiting,
        requests_total=counters.requests,
        images_total=counters.images,
        steps_total=counters.steps,
        steps_replayed_total=counters.replayed,
        cancelled_total=counters.cancelled,
        crashes_total=report.crashes,
        inference_ms_total=counters.inference_ms,
        idle_ms=idle_ms,
        stuck=report.stuck,
    )


def _placement(resident: Resident) -> pb.Placement:
    config, ready = resident.served.config, resident.engine.report.ready
    device = "" if ready is None else ready.device
    if not isinstance(config, ImageConfig):
        return pb.Placement(device=device)
    on_cpu = {
        "clip": config.clip_on_cpu,
        "vae": config.vae_on_cpu,
        "control": config.control_on_cpu,
        "diffusion": config.offload,
    }
    return pb.Placement(
        device=device,
        parts={name: "cpu" for name, is_on_cpu in on_cpu.items() if is_on_cpu},
        flash_attention=config.diffusion_flash_attention,
        vae_tiling=resident.served.defaults.tiles,
        stream_layers=config.offload,
        max_vram_mib=round(config.max_vram_gib * 1024) or None,
    )


def teleport_status(
    cache: Cache, prompts: pb.TeleportLayerStatus, *, start_step: int, native: bool, reason: str
) -> pb.TeleportStatus:
    """Return the state of the exact caches. `reason`: why the native part is not in force."""
    (results, result_bytes), (latents, latent_bytes) = cache.sizes()
    return pb.TeleportStatus(
        layers=[
            pb.TeleportLayerStatus(
                layer=pb.TELEPORT_LAYER_RESULT,
                available=cache.most_entries > 0,
                unavailable_reason="" if cache.most_entries else "OMNISERVE_SD_TELEPORT_CACHE_SIZE is 0",
                entries=results,
                max_entries=cache.most_entries,
                size_bytes=result_bytes,
                max_bytes=cache.most_bytes,
                hits_total=cache.results.hits,
                misses_total=cache.results.misses,
                evictions_total=cache.results.evictions,
            ),
            pb.TeleportLayerStatus(
                layer=pb.TELEPORT_LAYER_LATENT,
                available=native and cache.most_entries > 0,
                unavailable_reason="" if native else reason,
                entries=latents,
                max_entries=cache.most_entries,
                size_bytes=latent_bytes,
                max_bytes=cache.most_bytes,
                hits_total=cache.latents.hits,
                misses_total=cache.latents.misses,
                evictions_total=cache.latents.evictions,
            ),
            prompts,
        ],
        default_start_step=start_step,
        native=native,
    )


def prompts_status(residents: Sequence[Resident], *, reason: str) -> pb.TeleportLayerStatus:
    """Return the state of the encoded prompts that the hosts of the models keep. `reason`: why none are, else empty."""
    status = pb.TeleportLayerStatus(layer=pb.TELEPORT_LAYER_CONDITION, available=not reason, unavailable_reason=reason)
    for each in residents:
        kept, report, config = each.engine.prompts, each.engine.report, each.served.config
        entries, size = kept.held(report.pid)
        status.entries += entries
        status.size_bytes += size
        status.hits_total += kept.hits
        status.misses_total += kept.misses
        status.evictions_total += kept.evictions
        if report.ready is not None and isinstance(config, ImageConfig):
            status.max_entries += config.prompts
            status.max_bytes += config.prompt_bytes
    return status
