"""Enlarging a picture from request to file."""

import asyncio
from dataclasses import dataclass

from PIL import Image

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from services.diffusion import translate
from services.diffusion.adapters import pictures
from services.diffusion.adapters.engine import Pixels, Result, Slate
from services.diffusion.core.catalogue import Kind
from services.diffusion.core.options import AskedEncoding, Encoding, check_encoding, check_range
from services.diffusion.core.wire import Region, Upscale
from services.diffusion.generate import Who
from services.diffusion.outbox import Outbox
from services.diffusion.resident import Resident
from services.diffusion.residents import Residents
from services.diffusion.scene import Given
from services.diffusion.sink import Sink
from services.diffusion.tasks import tasks_of_request
from services.diffusion.timeline import Timeline
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.residents import ReplacedError


@dataclass(frozen=True, slots=True)
class UpscaleWork:
    """What is asked for, by whom; None: not said."""

    model: str
    image: Given | None
    factor: float | None
    tile_px: int | None
    encoding: AskedEncoding
    may_wait: bool
    who: Who


@dataclass(frozen=True, slots=True)
class _Order:
    source: Image.Image
    factor: float
    tile_px: int
    encoding: Encoding


class Upscaler:
    """Enlarges pictures."""

    def __init__(self, residents: Residents, clock: Clock, *, most_pixels: int, tile_px: int) -> None:
        self.draining = False
        self._residents = residents
        self._clock = clock
        self._most_pixels = most_pixels
        self._tile_px = tile_px

    async def run(self, work: UpscaleWork, outbox: Outbox) -> None:
        """Run one request to its end; the last thing said is `done`. Raises DomainError."""
        if self.draining:
            raise DomainError(Reason.DRAINING, "the service is stopping", retry_after_ms=5_000)
        while True:
            resident = self._residents.find(work.model, Kind.UPSCALER)
            try:
                await self._run(work, resident, outbox)
            except ReplacedError:
                continue
            return

    async def _run(self, work: UpscaleWork, resident: Resident, outbox: Outbox) -> None:
        order = await asyncio.to_thread(self._order, work, resident)
        timeline = Timeline(self._clock)

        def loading(progress: float | None) -> None:
            timeline.loading()
            outbox.put("loading", pb.Loading(model=resident.name, progress=progress))

        async with tasks_of_request() as tasks:
            sink = Sink(outbox, tasks, order.encoding, self._clock)
            async with self._residents.use(
                resident,
                work.who.asker(may_wait=work.may_wait),
                on_queued=lambda position, eta_ms: outbox.put("queued", pb.Queued(position=position, eta_ms=eta_ms)),
                on_loading=loading,
            ):
                timeline.granted()
                result = await resident.engine.run(lambda slate: _job(slate, order), sink)
        data, picture = await asyncio.to_thread(_finished, order, result)
        image = pb.Image(image=translate.output(data, picture, order.encoding), inference_ms=result.made.inference_ms)
        outbox.put("image", image)
        outbox.put("done", translate.upscaled(resident.name, result, timeline))

    def _order(self, work: UpscaleWork, resident: Resident) -> _Order:
        if work.image is None:
            raise DomainError(Reason.INVALID_REQUEST, "'image' must be given", field="image")
        most = resident.served.factor
        if work.factor is not None:
            check_range("factor", work.factor, 1, most)
        if work.tile_px is not None:
            check_range("tile_px", work.tile_px, 32, 2048)
        # What comes out must not be too large either.
        most_pixels = self._most_pixels // most**2
        if isinstance(work.image, bytes):
            source = pictures.decode(work.image, "image", most_pixels=most_pixels)
        else:
            source = pictures.from_samples(work.image, "image", most_pixels=most_pixels)
        return _Order(
            source,
            float(most) if work.factor is None else work.factor,
            work.tile_px or self._tile_px,
            check_encoding("encoding", work.encoding, resident.served.defaults.encoding),
        )


def _job(slate: Slate, order: _Order) -> Upscale:
    pixels = pictures.to_pixels(order.source, channels=3)
    region = Region(slate.board.put(pixels.samples), pixels.width, pixels.height, pixels.channels)
    return Upscale(slate.job, region, order.tile_px)


def _finished(order: _Order, result: Result) -> tuple[bytes, Pixels]:
    """Return the file and its picture: as large as was asked for, its transparency enlarged without the network."""
    width, height = (round(edge * order.factor) for edge in order.source.size)
    picture = pictures.scaled(pictures.from_pixels(result.pictures[0]), width, height)
    channels = 3
    if order.source.mode == "RGBA":
        picture.putalpha(pictures.scaled(order.source.getchannel("A"), width, height))
        channels = 4
    pixels = pictures.to_pixels(picture, channels=channels)
    return pictures.encode(pixels, order.encoding), pixels
