"""Exact replay for one request: its keys, what is there already, and what is kept of what was computed."""

import hashlib
from dataclasses import dataclass

import msgspec

from services.diffusion.adapters.engine import Pixels, Result
from services.diffusion.adapters.lora_files import LoraFile
from services.diffusion.core.options import Encoding, Options
from services.diffusion.core.teleport import Cache, Finished, Inputs, Latents, derived_seed, latent_key, result_key
from services.diffusion.core.wire import Ready
from services.diffusion.scene import Scene


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one picture."""

    latents: str
    result: str


def common_inputs(
    options: Options, scene: Scene, loras: tuple[LoraFile, ...], ready: Ready, *, profile: str, start_step: int
) -> Inputs:
    """Return what decides the bytes of a request's pictures, but for the seed. `ready`: the host that makes them."""
    return Inputs(
        model=ready.fingerprint,
        engine=f"{ready.version} {ready.device}",
        settings=profile,
        prompt=options.prompt,
        negative_prompt=options.negative_prompt,
        width=options.width,
        height=options.height,
        sampling=options.sampling,
        clip_skip=options.clip_skip,
        loras=tuple((each.digest, each.scale) for each in loras),
        sources=tuple(
            _digest(name, each)
            for name, each in (
                ("start", scene.start),
                ("mask", scene.mask),
                ("control", scene.control),
                *(("reference", each) for each in scene.references),
            )
            if each is not None
        ),
        strength=scene.strength,
        control_strength=scene.control_strength,
        start_step=start_step,
        seed=None,
    )


def _digest(name: str, picture: Pixels) -> str:
    told = f"{name} {picture.width} {picture.height} {picture.channels}\0".encode()
    return hashlib.sha256(told + picture.samples).hexdigest()


class Teleport:
    """The keys of a request's pictures and what the caches have of them. `seed`: of the first picture."""

    def __init__(self, cache: Cache, inputs: Inputs, options: Options, model: str) -> None:
        self.seed = derived_seed(inputs) if options.seed is None else options.seed
        self.start_step = inputs.start_step
        self._cache = cache
        self._model = model
        self._keys = [
            _keys(msgspec.structs.replace(inputs, seed=self.seed + place), options, options.encoding, model)
            for place in range(options.n)
        ]

    def key(self, place: int) -> str:
        """Return the key of a finished picture."""
        return self._keys[place].result

    def has(self, place: int) -> bool:
        """Return whether a finished picture is there, which counts as no look-up."""
        keys = self._keys[place]
        return self._cache.has(keys.latents, keys.result)

    def result(self, place: int) -> Finished | None:
        """Return a finished picture."""
        keys = self._keys[place]
        return self._cache.result(keys.latents, keys.result)

    def replay(self, place: int) -> Latents | None:
        """Return what the denoiser gave for a picture in the steps before the one that is resumed at."""
        return self._cache.replay(self._keys[place].latents)

    def keep(self, place: int, result: Result) -> None:
        """Keep what the denoiser gave."""
        recorded = result.made.recorded
        if recorded is not None:
            self._cache.keep(self._keys[place].latents, self._model, Latents(result.recorded, recorded.count))

    def keep_result(self, place: int, finished: Finished) -> None:
        """Keep a finished picture."""
        keys = self._keys[place]
        self._cache.keep_result(keys.latents, keys.result, self._model, finished)


def _keys(inputs: Inputs, options: Options, encoding: Encoding, model: str) -> Keys:
    return Keys(latent_key(inputs), result_key(inputs, options.tiling, encoding, model))
