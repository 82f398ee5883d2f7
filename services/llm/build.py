"""Putting the parts of llm together from its settings."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from services.kit.clock import Clock
from services.llm.adapters import model_file
from services.llm.adapters.engine import Engine, EngineLimits
from services.llm.adapters.model_file import ModelFile
from services.llm.adapters.text import TextHost
from services.llm.core.catalogue import entry
from services.llm.core.lifecycle import State
from services.llm.core.wire import EngineConfig, Sampling, TextConfig
from services.llm.generate import Generator, Permits, Waits
from services.llm.settings import LlmSettings


@dataclass(frozen=True, slots=True)
class Llm:
    """The parts; `supervise` of engine and text host are still to be run."""

    file: ModelFile
    engine: Engine
    text: TextHost
    generator: Generator


def build(settings: LlmSettings, permits: Permits, clock: Clock, *, on_state: Callable[[State], None]) -> Llm:
    """Read the model file's header and return the parts. Raises ModelFileError."""
    file = model_file.read(settings.gguf or model_file.default_path())
    engine = Engine(
        engine_config(settings, file),
        EngineLimits(load_s=settings.load_timeout_s, stuck_s=settings.stuck_s),
        clock,
        environ=host_environment(settings),
        on_state=on_state,
    )
    text = TextHost(
        TextConfig(str(file.path), settings.template_s, settings.prompt_bytes, settings.text_memory_mib),
        environ=host_environment(settings),
    )
    generator = Generator(
        entry=entry(file.path.stem, name=settings.model_name, aliases=settings.model_aliases),
        engine=engine,
        text=text,
        permits=permits,
        clock=clock,
        defaults=Sampling(
            temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, min_p=settings.min_p
        ),
        developer_role="developer" in file.header.template,
        system=settings.system(),
        waits=Waits(settings.load_wait_s, settings.prompt_bytes),
    )
    return Llm(file, engine, text, generator)


def engine_config(settings: LlmSettings, file: ModelFile) -> EngineConfig:
    """Return the engine host's configuration."""
    return EngineConfig(
        path=str(file.path),
        layers=file.header.layers,
        context_cells=settings.ctx,
        context_tokens=settings.request_ctx,
        slots=settings.contexts,
        warm_sequences=settings.warm_prefixes,
        batch_tokens=settings.batch,
        ubatch_tokens=settings.ubatch,
        threads=settings.compute_threads(),
        gpu_layers=None if settings.ngl == "auto" else settings.ngl,
        keep_free_mib=settings.ngl_auto_keep_free_mb,
        allow_cpu_fallback=settings.allow_cpu_fallback,
        kv_type=settings.kv_type,
        flash_attention=settings.flash_attention(),
        stall_s=settings.stall_ms / 1000,
        stall_ratio=settings.stall_ratio,
        flush_s=settings.flush_ms / 1000,
        govern_threads=settings.govern_threads,
    )


def host_environment(settings: LlmSettings) -> dict[str, str]:
    """Return what a host's environment has beyond ours.

    numpy's own threads would compete with the engine's. How long those spin is decided here unless the owner of the box
    has decided it with OpenMP's own variables.
    """
    ours = {"OPENBLAS_NUM_THREADS": "1"}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        ours["GOMP_SPINCOUNT"] = str(settings.spin)
    return ours
