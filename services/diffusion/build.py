"""Putting the parts of diffusion together from its settings."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.diffusion.adapters.lora_files import LoraFiles
from services.diffusion.core.options import Bounds
from services.diffusion.core.teleport import Cache
from services.diffusion.generate import Generator, Limits
from services.diffusion.operations import Operations
from services.diffusion.resident import Resident
from services.diffusion.residents import Residents
from services.diffusion.served import MIB, Broken, Served
from services.diffusion.settings import DiffusionSettings
from services.diffusion.upscale import Upscaler
from services.kit.clock import Clock
from services.kit.config import ConfigError
from services.kit.followed import Followed
from services.kit.hosts.coordinators import Coordinators
from services.kit.hosts.core.seats import Policy
from services.kit.hosts.hosting import Hosting, Permits
from services.kit.hosts.keeper import EngineLimits
from services.kit.hosts.leases import Leases
from services.kit.hosts.resident import MOST_LOADS
from services.kit.owner import Owner

_OPENMP: Final = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})


@dataclass(frozen=True, slots=True)
class Diffusion:
    """The parts; `run` of the hosting and `follow` of the catalogue's file are still to be run."""

    hosting: Hosting[Served, Resident]
    residents: Residents
    generator: Generator
    upscaler: Upscaler
    operations: Operations
    catalogue: Followed[tuple[Served | Broken, ...]]


def build(
    settings: DiffusionSettings,
    permits: Permits,
    clock: Clock,
    owner: Owner,
    *,
    leases: Leases,
    coordinators: Coordinators,
    on_health: Callable[[bool], None],
) -> Diffusion:
    """Read the model files' headers and return the parts. Files that cannot be used are told to the log, and to who asks.

    Raises ConfigError.
    """
    hosting: Hosting[Served, Resident] = Hosting(
        permits=permits,
        leases=leases,
        coordinators=coordinators,
        clock=clock,
        owner=owner,
        policy=Policy(settings.memory_mib or None, turn_s=settings.turn_s),
        make=partial(_resident, settings=settings, clock=clock),
        principal="diffusion",
        load_wait_s=settings.load_wait_s,
    )
    residents = Residents(hosting, settings, permits=permits, clock=clock, owner=owner, on_health=on_health)
    residents.take(residents.look())
    residents.health_changed()
    bounds = Bounds(settings.max_pixels, settings.prompt_chars, settings.max_batch)
    limits = Limits(bounds, settings.max_input_pixels, settings.teleport_start_step)
    cache = Cache(settings.teleport_cache_size, settings.teleport_cache_mib * MIB)
    return Diffusion(
        hosting,
        residents,
        Generator(residents, clock, limits, LoraFiles(settings.lora_dir, settings.lora_copies()), cache),
        Upscaler(residents, clock, most_pixels=settings.max_input_pixels, tile_px=settings.upscale_tile),
        Operations(
            residents,
            hosting,
            clock,
            cache,
            max_batch=settings.max_batch,
            start_step=settings.teleport_start_step,
        ),
        Followed(settings.config, residents.look, residents.take, refusals=(ConfigError,)),
    )


def host_environment() -> dict[str, str]:
    """Return what a host's environment has beyond ours.

    An engine that aborts does so at once, without starting a debugger first. numpy's own threads would compete with the
    engine's. Those sleep at barriers, unless the owner of the box has decided it with OpenMP's own variables: generations
    are bursts on cores that other services use too, and spinning costs them more than it saves.
    """
    ours = {"OPENBLAS_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"}
    return ours if _OPENMP & os.environ.keys() else {**ours, "OMP_WAIT_POLICY": "passive"}


def _resident(
    key: int,
    served: Served,
    on_state: Callable[[Resident], None],
    *,
    settings: DiffusionSettings,
    clock: Clock,
) -> Resident:
    return Resident(
        key,
        served,
        limits=EngineLimits(load_s=settings.load_timeout_s, stuck_s=settings.stuck_s, loads=MOST_LOADS),
        clock=clock,
        environ=host_environment(),
        cancel_s=settings.cancel_s,
        on_state=on_state,
    )
