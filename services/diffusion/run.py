"""The pictures of one request: computed, or recalled from the exact caches, and written."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from omniserve.diffusion.v1 import diffusion_pb2 as pb
from services.diffusion import translate
from services.diffusion.adapters import pictures
from services.diffusion.adapters.engine import Pixels, Slate
from services.diffusion.adapters.lora_files import LoraFile
from services.diffusion.core.options import Options
from services.diffusion.core.parameters import Facts, parameters
from services.diffusion.core.teleport import Finished, Latents
from services.diffusion.core.wire import Generate, Made, Tensors
from services.diffusion.outbox import Outbox
from services.diffusion.resident import Resident
from services.diffusion.scene import Scene
from services.diffusion.sink import Sink
from services.diffusion.teleport import Teleport
from services.kit.clock import Clock

_SEEDS: Final = 2**31
"""Seeds that are chosen here stay small enough for every caller's numbers."""


class Order(Protocol):
    """A request that can be carried out."""

    @property
    def options(self) -> Options:
        """What is asked for."""

    @property
    def scene(self) -> Scene:
        """What it starts from."""

    @property
    def loras(self) -> tuple[LoraFile, ...]:
        """Its adapters."""


@dataclass(slots=True)
class Tally:
    """What a request has taken so far. `sampler`, `scheduler`: as they were used."""

    images: int = 0
    inference_ms: int = 0
    sampler: str = ""
    scheduler: str = ""


class Run:
    """Makes a request's pictures with `resident`. `teleport`: None without."""

    def __init__(
        self, order: Order, resident: Resident, teleport: Teleport | None, outbox: Outbox, clock: Clock
    ) -> None:
        self.made = Tally()
        self.teleport = teleport
        self._order = order
        self.resident = resident
        self._outbox = outbox
        self._clock = clock
        self._chosen_seed = secrets.randbelow(_SEEDS)

    @property
    def _seed(self) -> int:
        if self.teleport is not None:
            return self.teleport.seed
        return self._chosen_seed if self._order.options.seed is None else self._order.options.seed

    def is_there(self) -> bool:
        """Return whether every picture is finished already."""
        teleport = self.teleport
        return teleport is not None and all(teleport.has(place) for place in range(self._order.options.n))

    def recall(self) -> None:
        """Say the finished pictures, which must all be there."""
        for place in range(self._order.options.n):
            self._recalled(place)

    def _recalled(self, place: int) -> bool:
        """Say a finished picture if it is there."""
        found = self.teleport.result(place) if self.teleport is not None else None
        if found is None or self.teleport is None:
            return False
        image = translate.recalled(found, self._order.options.encoding)
        self._outbox.put(
            "image",
            pb.Image(
                index=place,
                image=image,
                seed=self._seed + place,
                replay=pb.REPLAY_LAYER_RESULT,
                teleport_key=self.teleport.key(place),
            ),
        )
        self.made.images += 1
        self.made.sampler, self.made.scheduler = found.sampler, found.scheduler
        return True

    async def compute(self, tasks: asyncio.TaskGroup, *, batch: int) -> None:
        """Make the pictures, `batch` in a call of the engine. `tasks` write them. Raises DomainError `engine_failed`."""
        for first, count in self._batches(batch):
            if count == 1 and self._recalled(first):
                continue
            sink = Sink(self._outbox, tasks, self._order.options.encoding, self._clock, first=first)
            replay = self.teleport.replay(first) if self.teleport is not None else None
            result = await self.resident.engine.run(self._job(first, count, replay), sink)
            sink.is_over = True
            if self.teleport is not None:
                self.teleport.keep(first, result)
            made = result.made
            self.made.images += len(result.pictures)
            self.made.inference_ms += made.inference_ms
            self.made.sampler, self.made.scheduler = made.sampler, made.scheduler
            for place, picture in enumerate(result.pictures):
                tasks.create_task(self._finish(first + place, picture, made, is_replay=replay is not None))

    def _batches(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield place and number of the pictures of each call of the engine.

        A picture that starts from another one has a call of its own: the engine draws what it encodes that one with from the
        call's first seed, so in a batch only the first would equal a lone run. With teleport each is looked up by itself.
        """
        order = self._order
        if order.scene.start is not None or order.scene.references or self.teleport is not None:
            most = 1
        for first in range(0, order.options.n, most):
            yield first, min(most, order.options.n - first)

    async def _finish(self, place: int, picture: Pixels, made: Made, *, is_replay: bool) -> None:
        """Write a picture and say that it is there."""
        options, teleport = self._order.options, self.teleport
        encoding = options.encoding
        facts = Facts(
            self.resident.name, self._seed + place, picture.width, picture.height, made.sampler, made.scheduler
        )
        text = parameters(options, facts) if encoding.embeds else ""
        data = await asyncio.to_thread(pictures.encode, picture, encoding, text)
        if teleport is not None:
            finished = Finished(data, picture.width, picture.height, picture.channels, made.sampler, made.scheduler)
            teleport.keep_result(place, finished)
        count = len(made.images)
        image = pb.Image(
            index=place,
            image=translate.output(data, picture, encoding),
            seed=facts.seed,
            replay=pb.REPLAY_LAYER_LATENT if is_replay else pb.REPLAY_LAYER_UNSPECIFIED,
            resumed_at_step=teleport.start_step if is_replay and teleport is not None else None,
            inference_ms=made.inference_ms // count,
            denoise_calls=(made.denoise_calls or 0) // count,
            teleport_key=teleport.key(place) if teleport is not None else None,
            prompts_recalled=None if made.prompts is None else made.prompts.recalled,
        )
        self._outbox.put("image", image)

    def _job(self, first: int, count: int, replay: Latents | None) -> Callable[[Slate], Generate]:
        order, teleport = self._order, self.teleport
        options, start = order.options, order.scene

        def job(slate: Slate) -> Generate:
            return Generate(
                job=slate.job,
                prompt=options.prompt,
                negative_prompt=options.negative_prompt,
                width=options.width,
                height=options.height,
                sampling=options.sampling,
                seed=self._seed + first,
                count=count,
                clip_skip=options.clip_skip,
                loras=tuple((each.path, each.scale) for each in order.loras),
                tiling=options.tiling,
                start=slate.put(start.start),
                strength=start.strength,
                mask=slate.put(start.mask),
                references=tuple(region for each in start.references if (region := slate.put(each)) is not None),
                control=slate.put(start.control),
                control_strength=start.control_strength,
                previews=options.previews,
                replay=None if replay is None else _tensors(slate, replay),
                record_steps=teleport.start_step if teleport is not None and replay is None else 0,
            )

        return job


def _tensors(slate: Slate, replay: Latents) -> Tensors:
    return Tensors(slate.board.put(replay.data), replay.count, replay.size // replay.count)
