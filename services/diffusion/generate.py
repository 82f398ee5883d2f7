"""One request from its options to its pictures: check, wait for the permit, run, give everything back."""

import asyncio
from dataclasses import dataclass

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from services.diffusion import translate
from services.diffusion.adapters.lora_files import LoraFile, LoraFiles
from services.diffusion.core.catalogue import Kind
from services.diffusion.core.family import Family
from services.diffusion.core.loras import check_loras
from services.diffusion.core.options import AskedOptions, Bounds, Options, check_options
from services.diffusion.core.teleport import Cache, resumes_at
from services.diffusion.outbox import Outbox
from services.diffusion.resident import Resident
from services.diffusion.residents import Residents
from services.diffusion.run import Run
from services.diffusion.scene import Scene, Sources, open_sources, scene
from services.diffusion.spans import picture_span
from services.diffusion.tasks import tasks_of_request
from services.diffusion.teleport import Teleport, common_inputs
from services.diffusion.timeline import Timeline
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.residents import Asker, ReplacedError


@dataclass(frozen=True, slots=True)
class Who:
    """For whom it is. `is_operator`: it may name files by their paths."""

    client: str
    tier: str
    request_id: str
    is_operator: bool = False

    def asker(self, *, may_wait: bool) -> Asker:
        """Return for whom a model is used."""
        return Asker(self.tier, self.client, self.request_id, may_wait)


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked for, by whom."""

    model: str
    prompt: str
    options: AskedOptions
    sources: Sources
    who: Who


@dataclass(frozen=True, slots=True)
class Order:
    """A request that can be carried out. `start_step`: where it resumes, None without teleport."""

    options: Options
    scene: Scene
    loras: tuple[LoraFile, ...]
    start_step: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """`input_pixels`: of a picture that is taken; `start_step`: where a teleported run resumes when it does not say."""

    bounds: Bounds
    input_pixels: int
    start_step: int


class Generator:
    """Makes pictures."""

    def __init__(self, residents: Residents, clock: Clock, limits: Limits, loras: LoraFiles, cache: Cache) -> None:
        self.residents = residents
        self.cache = cache
        self.limits = limits
        self.draining = False
        self._clock = clock
        self._loras = loras

    async def run(self, work: Work, outbox: Outbox) -> None:
        """Run one request to its end; the last thing said is `done`.

        However it is left, the device and the permit are free then. Raises DomainError.
        """
        if self.draining:
            raise DomainError(Reason.DRAINING, "the service is stopping", retry_after_ms=5_000)
        while True:
            resident = self.residents.find(work.model, Kind.IMAGE)
            try:
                await self._run(work, resident, outbox)
            except ReplacedError:
                continue
            return

    async def _run(self, work: Work, resident: Resident, outbox: Outbox) -> None:
        order = await self._checked(work, resident)
        timeline = Timeline(self._clock)
        run = Run(order, resident, self._teleport(order, resident), outbox, self._clock)
        if run.is_there():  # no device is needed, so no permit
            timeline.granted()
            run.recall()
            outbox.put("done", translate.done(resident.name, order.options, run.made, timeline))
            return

        with picture_span(resident.name, order.options, timeline):
            await self._compute(work, order, run, timeline, outbox)
        outbox.put("done", translate.done(resident.name, order.options, run.made, timeline))

    async def _compute(self, work: Work, order: Order, run: Run, timeline: Timeline, outbox: Outbox) -> None:
        """Wait for permit and model, and make the pictures; they are encoded when the permit is free again."""
        resident = run.resident

        def loading(progress: float | None) -> None:
            timeline.loading()
            outbox.put("loading", pb.Loading(model=resident.name, progress=progress))

        async with (
            tasks_of_request() as tasks,
            self.residents.use(
                resident,
                work.who.asker(may_wait=order.options.may_wait),
                on_queued=lambda position, eta_ms: outbox.put("queued", pb.Queued(position=position, eta_ms=eta_ms)),
                on_loading=loading,
            ),
        ):
            timeline.granted()
            run.teleport = self._teleport(order, resident)  # by what is loaded now
            await run.compute(tasks, batch=self.limits.bounds.batch)
            timeline.computed()

    def _teleport(self, order: Order, resident: Resident) -> Teleport | None:
        """Return what the caches may know; None without teleport, and while nobody knows what will be loaded."""
        ready = resident.engine.report.ready
        if order.start_step is None or ready is None:
            return None
        inputs = common_inputs(
            order.options,
            order.scene,
            order.loras,
            ready,
            profile=resident.served.profile,
            start_step=order.start_step,
        )
        return Teleport(self.cache, inputs, order.options, resident.name)

    async def _checked(self, work: Work, resident: Resident) -> Order:
        """Check a request, beside the loop when files must be decoded or copied for that. Raises DomainError."""
        if (
            work.sources.images
            or work.sources.mask is not None
            or work.sources.control is not None
            or work.options.loras
        ):
            return await asyncio.to_thread(self._order, work, resident)
        return self._order(work, resident)

    def _order(self, work: Work, resident: Resident) -> Order:
        """Check a request, decode its pictures and find its adapters. Raises DomainError."""
        served, family = resident.served, _family(resident)
        has_control = "control_net" in served.parts
        opened = open_sources(work.sources, family, has_control=has_control, most_pixels=self.limits.input_pixels)
        options = check_options(work.prompt, work.options, served.defaults, self.limits.bounds, size=opened.size)
        named = check_loras(work.options.loras, has_folder=self._loras.has_folder, is_operator=work.who.is_operator)
        found = scene(opened, work.sources, family, width=options.width, height=options.height)
        start_step = None
        if work.options.teleports:
            start_step = resumes_at(work.options.start_step, self.limits.start_step, options.sampling.steps)
        return Order(options, found, self._loras.find(named), start_step)


def _family(resident: Resident) -> Family:
    family = resident.served.family
    if family is None:
        raise TypeError(f"{resident.name} makes no pictures")
    return family
