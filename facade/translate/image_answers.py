"""Pictures on their way back: OpenAI's whole answer, or its events."""

import base64
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import orjson

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.media.v1 import media_pb2
from services.kit.errors import DomainError, Reason

PictureEvent = pb.GenerateImageResponse | pb.EditImageResponse | pb.VaryImageResponse | pb.UpscaleImageResponse

_FORMATS: Final[Mapping[int, str]] = MappingProxyType(
    {media_pb2.IMAGE_FORMAT_PNG: "png", media_pb2.IMAGE_FORMAT_JPEG: "jpeg", media_pb2.IMAGE_FORMAT_WEBP: "webp"}
)
_REPLAYS: Final[Mapping[int, str]] = MappingProxyType(
    {pb.REPLAY_LAYER_LATENT: "exact_prompt_latent_replay", pb.REPLAY_LAYER_RESULT: "exact_prompt_result_cache"}
)
_PHASES: Final[Mapping[int, str]] = MappingProxyType(
    {
        pb.PHASE_DENOISING: "denoising",
        pb.PHASE_DECODING: "decoding",
        pb.PHASE_UPSCALING: "upscaling",
        pb.PHASE_ENCODING: "encoding",
    }
)


def _written(image: media_pb2.ImageOutput) -> dict[str, str]:
    """Return how a picture is written, in OpenAI's words."""
    return {
        "size": f"{image.width_px}x{image.height_px}",
        "background": "transparent" if image.channels == 4 else "opaque",
        "output_format": _FORMATS.get(image.format, "png"),
    }


def _base64(image: media_pb2.ImageOutput) -> str:
    return base64.b64encode(image.data).decode()


def _told(image: pb.Image) -> dict[str, Any]:
    """Return what we know of a picture beyond OpenAI's fields."""
    told: dict[str, Any] = {
        "index": image.index,
        "seed": image.seed,
        "inference_time_ms": image.inference_ms,
        "denoise_calls": image.denoise_calls,
    }
    if image.replay in _REPLAYS:
        told["cache"] = _REPLAYS[image.replay]
    for name in ("resumed_at_step", "teleport_key", "prompts_recalled"):
        if image.HasField(name):
            told[name] = getattr(image, name)
    return told


def _run(done: pb.Done) -> dict[str, Any]:
    """Return what we know of the whole run beyond OpenAI's fields."""
    return {
        "model": done.model,
        "inference_time_ms": done.inference_ms,
        "queue_ms": done.queue_ms,
        "load_ms": done.load_ms,
        "steps": done.steps,
        "guidance": round(done.guidance, 6),
        "sampler": done.sampler,
        "scheduler": done.scheduler,
    }


def _usage(done: pb.Done) -> dict[str, Any]:
    """Return the tokens of the prompt, which is all that has any here."""
    tokens = done.prompt_tokens
    return {
        "input_tokens": tokens,
        "output_tokens": 0,
        "total_tokens": tokens,
        "input_tokens_details": {"text_tokens": tokens, "image_tokens": 0},
    }


def _cut_short(found: int, asked: int) -> DomainError:
    return DomainError(Reason.ENGINE_FAILED, f"The answer was cut short: {found} of {asked} pictures were made.")


class WholePictures:
    """An answer that is told when all its pictures are there. `created`: seconds since 1970."""

    def __init__(self, pictures: int, created: int) -> None:
        self._pictures = pictures
        self._created = created
        self._images: dict[int, pb.Image] = {}
        self._done = pb.Done()

    def take(self, event: PictureEvent) -> None:
        """Take what happened."""
        if event.HasField("image"):
            self._images[event.image.index] = event.image
        elif event.HasField("done"):
            self._done = event.done

    def images(self) -> list[pb.Image]:
        """Return the pictures in their order. Raises DomainError engine_failed when one is missing."""
        if len(self._images) < self._pictures:
            raise _cut_short(len(self._images), self._pictures)
        return [image for _, image in sorted(self._images.items())]

    def result(self, urls: Sequence[str] = ()) -> dict[str, Any]:
        """Return the answer, with URLs for the pictures if there are any. Raises DomainError as `images`."""
        images = self.images()
        places = [{"url": url} for url in urls] if urls else [{"b64_json": _base64(each.image)} for each in images]
        result: dict[str, Any] = {
            "created": self._created,
            "data": [{**place, "omniserve": _told(image)} for place, image in zip(places, images, strict=True)],
            **_written(images[0].image),
            "omniserve": _run(self._done),
        }
        if self._done.HasField("prompt_tokens"):
            result["usage"] = _usage(self._done)
        return result


class PictureStream:
    """An answer as OpenAI's events, with the steps as comments in between.

    The last picture is told when the engine says that all is done: an answer that was cut short never looks whole.
    `event`: what the events' names begin with. `created`: seconds since 1970. `holds`: steps are not told before an event is.
    """

    def __init__(self, event: str, pictures: int, created: int, *, holds: bool = False) -> None:
        self._holds = holds
        self._event = event
        self._pictures = pictures
        self._created = created
        self._found: set[int] = set()
        self._last: pb.Image | None = None

    def said(self, events: Sequence[PictureEvent]) -> bytes:
        """Return the bytes for what happened. Raises DomainError engine_failed when a picture is missing at the end."""
        return b"".join([self._said(event) for event in events])

    def _said(self, event: PictureEvent) -> bytes:
        if event.HasField("step"):
            phase = None if self._holds else _PHASES.get(event.step.phase)
            return f": {phase} {event.step.step}/{event.step.steps}\n\n".encode() if phase else b""
        if isinstance(event, pb.UpscaleImageResponse) or not event.HasField("preview"):
            return self._finished(event)
        preview = event.preview
        return self._frame(
            "partial_image",
            preview.image,
            {"partial_image_index": preview.partial_index},
            {"index": preview.index, "step": preview.step},
        )

    def _finished(self, event: PictureEvent) -> bytes:
        if event.HasField("image"):
            before, self._last = self._last, event.image
            self._found.add(event.image.index)
            return self._completed(before, pb.Done()) if before is not None else b""
        if not event.HasField("done"):
            return b""
        if self._last is None or len(self._found) < self._pictures:
            raise _cut_short(len(self._found), self._pictures)
        return self._completed(self._last, event.done)

    def _completed(self, image: pb.Image, done: pb.Done) -> bytes:
        run = _run(done) if done.model else {}
        return self._frame("completed", image.image, {"usage": _usage(done)}, run | _told(image))

    def _frame(
        self, kind: str, image: media_pb2.ImageOutput, more: Mapping[str, Any], ours: Mapping[str, Any]
    ) -> bytes:
        self._holds = False
        name = f"{self._event}.{kind}"
        told = {"type": name, "b64_json": _base64(image), "created_at": self._created, "quality": "auto"}
        return _event(name, {**told, **_written(image), **more, "omniserve": ours})

    @staticmethod
    def word(events: Sequence[PictureEvent]) -> str:
        """Return what a waiting request waits for, by the newest event that says it; "" for nothing new."""
        words = [_word(event) for event in events]
        return next((word for word in reversed(words) if word), "")

    @staticmethod
    def end() -> bytes:
        """Return what ends a whole answer: OpenAI's streams of pictures have no last word."""
        return b""

    @staticmethod
    def failed(told: Mapping[str, Any]) -> bytes:
        """Return the event that ends an answer which broke; `told` is the error in OpenAI's shape."""
        return _event("error", {"type": "error", **told})


def _word(event: PictureEvent) -> str:
    if event.HasField("queued"):
        return f"queued {event.queued.position}"
    if event.HasField("loading"):
        return f"loading {event.loading.progress:.2f}" if event.loading.HasField("progress") else "loading"
    return "preparing" if event.HasField("step") else ""


def _event(name: str, value: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"
