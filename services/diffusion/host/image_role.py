"""The host of an image model: loads it, then makes pictures one job after the other."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from services.diffusion.core.conditions import prompt_context
from services.diffusion.core.wire import (
    Failed,
    Generate,
    ImageConfig,
    Made,
    Preview,
    Progress,
    Prompts,
    Ready,
    Region,
    Tensors,
    ToHost,
)
from services.diffusion.host.files import fingerprint
from services.diffusion.host.jobs import Jobs
from services.diffusion.host.native import Native, NativeError, Texts, Watch
from services.kit.hosts.board import Board
from services.kit.hosts.core.framing import Frames
from services.kit.hosts.core.messages import LoadFailed
from services.kit.hosts.pipe import Pipe
from services.kit.hosts.serving import compute_and_listen, first

if TYPE_CHECKING:
    from services.diffusion.host import sd


def serve_images(pipe: Pipe, inbox: Board, outbox: Board) -> None:
    """Serve until the service closes the pipe; exit status 0 after a failed load that was reported."""
    frames: Frames[ToHost] = Frames(ToHost)
    config = first(pipe, frames, ImageConfig)
    native, reason = _native(config.native)
    prompts_reason = reason
    from services.diffusion.host import sd  # noqa: PLC0415 - the engine must come after what watches it

    if native is not None:
        try:
            native.bind(sd.library_handle())
        except NativeError as error:
            native, reason = None, str(error)
        prompts_reason = reason or _bound_prompts(native, sd.library_handle(), config)
    try:
        before = fingerprint(config.files.values())
        model = sd.ImageModel(config)
        if fingerprint(config.files.values()) != before:
            pipe.send(LoadFailed("its files were changed while they were read"))
            return
    except (sd.EngineError, OSError) as error:
        pipe.send(LoadFailed(str(error)))
        return
    painter = Painter(model, native, pipe, inbox, outbox, keeps_prompts=not prompts_reason)
    pipe.send(
        Ready(
            version=sd.engine_version(),
            fingerprint=before,
            device=sd.device(),
            native=native is not None,
            native_reason=reason,
            prompts_reason=prompts_reason,
            sampler=model.default_sampler(),
        )
    )
    compute_and_listen(painter.run, lambda: painter.jobs.listen(pipe, frames))


def _native(path: str) -> tuple[Native | None, str]:
    try:
        return Native(path), ""
    except NativeError as error:
        return None, str(error)


def _bound_prompts(native: Native | None, engine: int, config: ImageConfig) -> str:
    """Have encoded prompts kept; return why they are not."""
    if native is None:
        return "what watches the engine is not in force"
    try:
        native.bind_prompts(engine, config.prompts, config.prompt_bytes)
    except NativeError as error:
        return str(error)
    return ""


class Painter:
    """Makes pictures with a loaded model."""

    def __init__(
        self,
        model: "sd.ImageModel",
        native: Native | None,
        pipe: Pipe,
        inbox: Board,
        outbox: Board,
        *,
        keeps_prompts: bool,
    ) -> None:
        self.jobs: Jobs[Generate] = Jobs(Generate, self._forget_prompts)
        self._keeps_prompts = keeps_prompts
        self._clears = 0
        self._model = model
        self._native = native
        self._pipe = pipe
        self._inbox = inbox
        self._outbox = outbox

    def run(self) -> None:
        """Do jobs, for ever."""
        while True:
            job = self.jobs.next()
            self._outbox.clear()
            self._pipe.send(Progress(job.job, "conditioning", 0, 0, 1))
            try:
                self._pipe.send(self._failed(job, "cancelled") if self.jobs.is_cancelled() else self._do(job))
            finally:
                self.jobs.done()
                self._forget()  # after the answer: whoever waits for that need not wait for this

    def _forget_prompts(self) -> None:
        """Keep none of the encoded prompts; on the thread that hears of orders."""
        if self._native is not None:
            self._native.forget_prompts()
        self._clears += 1

    @staticmethod
    def _forget() -> None:
        from services.diffusion.host import sd  # noqa: PLC0415 - see serve_images

        sd.forget_memory()

    def _do(self, job: Generate) -> Made | Failed:
        began_s = time.monotonic()
        if self._native is None:
            return self._generate(job, None, began_s)
        replay = b"" if job.replay is None else self._inbox.take(job.replay.offset, job.replay.size)
        blocks = 0 if job.replay is None else job.replay.count
        texts = Texts(job.prompt, job.negative_prompt, self._prompt_context(job))
        with self._native.watch(replay=replay, blocks=blocks, record_steps=job.record_steps, texts=texts) as watch:
            self.jobs.stoppable(watch.stop)
            try:
                return self._generate(job, watch, began_s)
            finally:
                self.jobs.stoppable(None)

    def _generate(self, job: Generate, watch: Watch | None, began_s: float) -> Made | Failed:
        from services.diffusion.host import sd  # noqa: PLC0415 - see serve_images

        missing = [path for path, _ in job.loras if not Path(path).exists()]
        if missing:  # the engine would go on without saying so
            return self._failed(job, f"{len(missing)} of the adapters are not there any more")
        previews = [0] * job.count

        def stepped(phase: str, index: int, step: int, steps: int) -> None:
            self._pipe.send(Progress(job.job, phase, index, step, steps))

        def previewed(index: int, step: int, picture: sd.Picture) -> None:
            if index < job.count and previews[index] < job.previews and step < job.sampling.steps:
                previews[index] += 1
                self._pipe.send(Preview(job.job, index, step, self._put(picture)))

        watcher = sd.Watcher(stepped, previewed)
        try:
            found = self._model.generate(job, self._inputs(job), watcher)
        except sd.EngineError as error:
            if watch is not None and watch.misfit:
                return self._failed(job, "what was to be replayed is of another size")
            return self._failed(job, str(error))
        for place, (path, _) in enumerate(job.loras):
            if watcher.applied.get(path) == 0:  # the engine goes on without a word
                field = f"options.loras[{place}]"
                return Failed(
                    job.job, f"'{field}' is an adapter for another model: no part of it fits this one", field=field
                )
        sampler, scheduler = self._model.chosen(job.sampling.sampler, job.sampling.scheduler)
        return Made(
            job.job,
            tuple(self._put(picture) for picture in found),
            inference_ms=round((time.monotonic() - began_s) * 1000),
            sampler=sampler,
            scheduler=scheduler,
            denoise_calls=None if watch is None else watch.calls,
            recorded=self._recorded(watch) if watch is not None and job.record_steps else None,
            prompts=self._prompts(watch) if watch is not None and self._keeps_prompts else None,
        )

    def _prompt_context(self, job: Generate) -> bytes:
        if not self._keeps_prompts:
            return b""
        regions = (job.start, job.mask, *job.references, job.control)
        return prompt_context(job, (self._inbox.take(each.offset, each.size) for each in regions if each is not None))

    def _prompts(self, watch: Watch) -> Prompts:
        clears = self._clears  # before what is kept is counted, so that a clear between is not taken for heard of
        return Prompts(*watch.prompts(), *watch.kept_prompts(), clears)

    def _failed(self, job: Generate, message: str) -> Failed:
        return Failed(job.job, message, cancelled=self.jobs.is_cancelled())

    def _recorded(self, watch: Watch) -> Tensors | None:
        data, count = watch.recorded()
        return Tensors(self._outbox.put(data), count, len(data) // count) if count else None

    def _put(self, picture: "sd.Picture") -> Region:
        return Region(self._outbox.put(picture.samples), picture.width, picture.height, picture.channels)

    def _inputs(self, job: Generate) -> "sd.Inputs":
        from services.diffusion.host import sd  # noqa: PLC0415 - see serve_images

        return sd.Inputs(
            start=self._picture(job.start),
            mask=self._picture(job.mask),
            references=[picture for each in job.references if (picture := self._picture(each)) is not None],
            control=self._picture(job.control),
        )

    def _picture(self, region: Region | None) -> "sd.Picture | None":
        from services.diffusion.host import sd  # noqa: PLC0415 - see serve_images

        if region is None:
            return None
        return sd.Picture(region.width, region.height, region.channels, self._inbox.take(region.offset, region.size))
