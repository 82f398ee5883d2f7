"""What the engine says about a job, turned into events of its request."""

import asyncio
from typing import Final

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from services.diffusion import translate
from services.diffusion.adapters import pictures
from services.diffusion.adapters.engine import Pixels
from services.diffusion.core.options import Encoding
from services.diffusion.core.wire import Preview, Progress
from services.diffusion.outbox import Outbox
from services.kit.clock import Clock

_TOLD_EVERY_S: Final = 0.05
"""Each step that is told wakes three processes that the engine could use the time of."""


class Sink:
    """Tells an outbox. `first`: the place of the job's first picture in the request; `tasks`: run what takes longer."""

    def __init__(
        self, outbox: Outbox, tasks: asyncio.TaskGroup, encoding: Encoding, clock: Clock, *, first: int = 0
    ) -> None:
        self._outbox = outbox
        self._tasks = tasks
        self._encoding = encoding
        self._clock = clock
        self._first = first
        self._previews: dict[int, int] = {}
        self._began: tuple[str, int, int, float] | None = None
        self._told: tuple[str, int] | None = None
        self._told_s = 0.0
        self.is_over = False

    def progress(self, progress: Progress) -> None:
        """Take a step. Of quick ones not each is told, but the first and the last of a phase are."""
        eta_ms = self._eta_ms(progress)
        now_s = self._clock.monotonic()
        part = (progress.phase, progress.index)
        is_between = part == self._told and progress.step < progress.steps
        if is_between and now_s - self._told_s < _TOLD_EVERY_S:
            return
        self._told, self._told_s = part, now_s
        self._outbox.put("step", translate.step(progress, self._first, eta_ms=eta_ms), part=part)

    def _eta_ms(self, progress: Progress) -> int | None:
        """Return how long the rest of a phase takes, if its steps take as long as those before."""
        now_s = self._clock.monotonic()
        began = self._began
        if began is None or began[:2] != (progress.phase, progress.index):
            self._began = (progress.phase, progress.index, progress.step, now_s)
            return None
        done = progress.step - began[2]
        return round((now_s - began[3]) / done * (progress.steps - progress.step) * 1000) if done > 0 else None

    def preview(self, preview: Preview, picture: Pixels) -> None:
        """Take a picture so far."""
        self._tasks.create_task(self._preview(preview, picture, self._previews.get(preview.index, 0)))
        self._previews[preview.index] = self._previews.get(preview.index, 0) + 1

    async def _preview(self, preview: Preview, picture: Pixels, place: int) -> None:
        data = await asyncio.to_thread(pictures.encode, picture, self._encoding)
        if not self.is_over:  # else the picture itself is there
            image = translate.output(data, picture, self._encoding)
            message = pb.Preview(index=self._first + preview.index, partial_index=place, step=preview.step, image=image)
            self._outbox.put("preview", message)
