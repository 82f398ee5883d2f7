"""Putting the parts of llm together from its settings."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

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
from services.llm.adapters.model_file import ModelFileError
from services.llm.embed import Embeddings
from services.llm.generate import Generator, Waits
from services.llm.operations import Operations
from services.llm.resident import Resident
from services.llm.residents import Residents
from services.llm.served import Served, read_served
from services.llm.settings import LlmSettings
from services.llm.vocabularies import Vocabularies


@dataclass(frozen=True, slots=True)
class Llm:
    """The parts; `run` of the hosting and `follow` of the catalogue's file are still to be run."""

    hosting: Hosting[Served, Resident]
    residents: Residents
    generator: Generator
    operations: Operations
    embeddings: Embeddings
    catalogue: Followed[tuple[Served, ...]]


def build(
    settings: LlmSettings,
    permits: Permits,
    clock: Clock,
    owner: Owner,
    *,
    leases: Leases,
    coordinators: Coordinators,
    on_health: Callable[[bool], None],
) -> Llm:
    """Read the model files' headers and return the parts. Raises ConfigError and ModelFileError."""
    vocabularies = Vocabularies(owner, clock)
    hosting = Hosting(
        permits=permits,
        leases=leases,
        coordinators=coordinators,
        clock=clock,
        owner=owner,
        policy=Policy(settings.memory_mib or None, turn_s=settings.turn_s),
        make=partial(
            _resident,
            limits=EngineLimits(load_s=settings.load_timeout_s, stuck_s=settings.stuck_s, loads=MOST_LOADS),
            clock=clock,
            environ=host_environment(settings),
        ),
        principal="llm",
        tidy=vocabularies.tidy,
        load_wait_s=settings.load_wait_s,
    )
    residents = Residents(hosting, vocabularies, permits=permits, clock=clock, owner=owner, on_health=on_health)
    refusals = (ConfigError, ModelFileError)
    catalogue = Followed(settings.config, partial(read_served, settings), residents.apply, refusals=refusals)
    residents.apply(read_served(settings))
    generator = Generator(residents, clock, Waits(settings.load_wait_s, settings.prompt_bytes))
    embeddings = Embeddings(residents, Waits(settings.load_wait_s, settings.prompt_bytes))
    return Llm(hosting, residents, generator, Operations(residents, hosting, clock), embeddings, catalogue)


def _resident(
    key: int,
    served: Served,
    on_state: Callable[[Resident], None],
    *,
    limits: EngineLimits,
    clock: Clock,
    environ: Mapping[str, str],
) -> Resident:
    return Resident(key, served, limits=limits, clock=clock, environ=environ, on_state=on_state)


def host_environment(settings: LlmSettings) -> dict[str, str]:
    """Return what a host's environment has beyond ours.

    numpy's own threads would compete with the engine's. How long those spin is decided here unless the owner of the box
    has decided it with OpenMP's own variables.
    """
    ours = {"OPENBLAS_NUM_THREADS": "1"}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        ours["GOMP_SPINCOUNT"] = str(settings.spin)
    return ours
