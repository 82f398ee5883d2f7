"""The host of an upscaler: enlarges pictures tile by tile, so that a job can be ended at the next tile."""

import time
from typing import Final

import numpy as np
import numpy.typing as npt

from services.diffusion.core.tiles import spans
from services.diffusion.core.wire import Failed, Made, Progress, Ready, Region, ToHost, Upscale, UpscalerConfig
from services.diffusion.host import sd
from services.diffusion.host.files import fingerprint
from services.diffusion.host.jobs import Jobs
from services.kit.hosts.board import Board
from services.kit.hosts.core.framing import Frames
from services.kit.hosts.core.messages import LoadFailed
from services.kit.hosts.pipe import Pipe
from services.kit.hosts.serving import compute_and_listen, first

_MARGIN_PX: Final = 12
"""How much of its surroundings a tile brings: what lies further off hardly changes a pixel of ESRGAN's."""
Pixels = npt.NDArray[np.uint8]


def serve_upscaler(pipe: Pipe, inbox: Board, outbox: Board) -> None:
    """Serve until the service closes the pipe; exit status 0 after a failed load that was reported."""
    frames: Frames[ToHost] = Frames(ToHost)
    config = first(pipe, frames, UpscalerConfig)
    try:
        seen = fingerprint([config.path])
        model = sd.UpscalerModel(config)
    except (sd.EngineError, OSError) as error:
        pipe.send(LoadFailed(str(error)))
        return
    enlarger = Enlarger(model, pipe, inbox, outbox)
    pipe.send(Ready(sd.engine_version(), seen, sd.device(), native=True, factor=model.factor))
    compute_and_listen(enlarger.run, lambda: enlarger.jobs.listen(pipe, frames))


class Enlarger:
    """Enlarges pictures with a loaded upscaler."""

    def __init__(self, model: sd.UpscalerModel, pipe: Pipe, inbox: Board, outbox: Board) -> None:
        self.jobs: Jobs[Upscale] = Jobs(Upscale)
        self._model = model
        self._pipe = pipe
        self._inbox = inbox
        self._outbox = outbox

    def run(self) -> None:
        """Do jobs, for ever."""
        while True:
            job = self.jobs.next()
            self._outbox.clear()
            try:
                self._pipe.send(self._do(job))
            except sd.EngineError as error:
                self._pipe.send(Failed(job.job, str(error)))
            finally:
                self.jobs.done()
                sd.forget_memory()

    def _do(self, job: Upscale) -> Made | Failed:
        began_s = time.monotonic()
        image = job.image
        data = self._inbox.take(image.offset, image.size)
        source = np.frombuffer(data, np.uint8).reshape(image.height, image.width, image.channels)
        factor = self._model.factor
        target = np.empty((image.height * factor, image.width * factor, image.channels), np.uint8)
        tiles = [
            (row, column)
            for row in spans(image.height, tile=job.tile_px, margin=_MARGIN_PX)
            for column in spans(image.width, tile=job.tile_px, margin=_MARGIN_PX)
        ]
        for done, (row, column) in enumerate(tiles):
            self._pipe.send(Progress(job.job, "upscaling", 0, done, len(tiles)))
            if self.jobs.is_cancelled():
                return Failed(job.job, "cancelled", cancelled=True)
            tile = self._enlarged(source[row.first : row.last, column.first : column.last])
            top, left = (row.keep - row.first) * factor, (column.keep - column.first) * factor
            height, width = (row.until - row.keep) * factor, (column.until - column.keep) * factor
            target[
                row.keep * factor : row.keep * factor + height, column.keep * factor : column.keep * factor + width
            ] = tile[top : top + height, left : left + width]
        self._pipe.send(Progress(job.job, "upscaling", 0, len(tiles), len(tiles)))
        region = Region(self._outbox.put(target.tobytes()), target.shape[1], target.shape[0], image.channels)
        return Made(job.job, (region,), inference_ms=round((time.monotonic() - began_s) * 1000))

    def _enlarged(self, tile: Pixels) -> Pixels:
        height, width, channels = tile.shape
        found = self._model.enlarge(sd.Picture(width, height, channels, tile.tobytes()))
        return np.frombuffer(found.samples, np.uint8).reshape(found.height, found.width, found.channels)
