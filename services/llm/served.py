"""The models that the settings ask for: each with everything that is decided before it is loaded."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from services.kit import config
from services.kit.config import ConfigError, Document, Fault
from services.llm.adapters import model_file
from services.llm.adapters.model_file import ModelFile, ModelFileError
from services.llm.core.catalogue import Entry, Kind, entry, repeated
from services.llm.core.embed_wire import EmbedConfig
from services.llm.core.memory import MIB, lease_mib, need_mib, scratch_mib
from services.llm.core.speculation import MOST_UNLIKE_TOKENS
from services.llm.core.tuning import largest_kv_type, largest_ubatch_tokens
from services.llm.core.wire import DraftModelConfig, EngineConfig, Sampling, SpeculationRules, TextConfig
from services.llm.sections import ModelSection, ModelsSection, is_others
from services.llm.settings import LlmSettings

DEFAULT_EMBEDDING: Final = "all-MiniLM-L6-v2.Q8_0.gguf"
"""What set-up puts into the models folder."""
_LEAST_CELLS: Final = 256
_PROFILE_CHARACTERS: Final = 32
_CHAT_ONLY: Final = frozenset(
    {"sampling", "system", "request_ctx", "contexts", "warm_prefixes", "kv_type", "loras", "draft"}
)


@dataclass(frozen=True, slots=True)
class Served:
    """A model of the catalogue. `system`: message for chats that bring none; None leaves it to the template.

    `ttl_s`: how long it stays in memory idle, 0 for ever. `pinned`: it never makes room for another. `preload`: it is loaded
    at the start. `required`: the service is ready only with it. `is_fixed`: its name was given, not taken from the file.
    `loras_bytes`: size of its adapters' files; `draft`: the model that drafts for it.
    """

    entry: Entry
    file: ModelFile
    engine: EngineConfig | EmbedConfig
    text: TextConfig
    sampling: Sampling
    system: str | None
    ttl_s: float = 0.0
    pinned: bool = False
    preload: bool = False
    required: bool = False
    is_fixed: bool = True
    loras_bytes: int = 0
    draft: ModelFile | None = None

    @property
    def chat(self) -> EngineConfig:
        """How its host runs. Raises TypeError for a model that generates no text."""
        if isinstance(self.engine, EmbedConfig):
            raise TypeError(f"{self.entry.name} generates no text")
        return self.engine

    @property
    def name(self) -> str:
        """What callers call it."""
        return self.entry.name

    @property
    def profile(self) -> str:
        """What tells this way of running it from another."""
        draft = None if self.draft is None else (self.draft.size, self.draft.made_unix_s)
        said = msgspec.json.encode((self.engine, self.file.size, self.file.made_unix_s, self.loras_bytes, draft))
        return hashlib.sha256(said).hexdigest()[:_PROFILE_CHARACTERS]

    @property
    def file_mib(self) -> int:
        """Size of its files, MiB."""
        draft_bytes = 0 if self.draft is None else self.draft.size
        return -(-(self.file.size + self.loras_bytes + draft_bytes) // MIB)

    @property
    def files(self) -> tuple[str, ...]:
        """Its files."""
        loras = () if isinstance(self.engine, EmbedConfig) else self.engine.loras.values()
        drafts = () if self.draft is None else (str(self.draft.path),)
        return (str(self.file.path), *loras, *drafts)

    @property
    def on_host(self) -> bool:
        """Whether none of its layers is to be on a GPU."""
        return self.engine.gpu_layers == 0

    def lease_mib(self, *, seen_mib: int | None, on_host: bool) -> int:
        """Return how much memory to lease: files, cache and what a step needs, or as much as it was seen to take."""
        config = self.engine
        makes_vectors = isinstance(config, EmbedConfig)
        step_tokens = (
            config.batch_tokens
            if isinstance(config, EmbedConfig)
            else largest_ubatch_tokens(config.tuning, on_host=on_host)
        )
        share = 1.0
        if not on_host and config.gpu_layers is not None and config.layers > 0:
            share = min(1.0, config.gpu_layers / config.layers) if config.gpu_layers > 0 else 1.0
        return lease_mib(
            kept_mib=self.need_mib,
            scratch_mib=scratch_mib(self.file.header, step_tokens=step_tokens, has_logits=not makes_vectors),
            share=share,
            seen_mib=seen_mib,
        )

    @property
    def modality(self) -> str:
        """What its requests ask admission for."""
        return "llm" if self.entry.kind is Kind.CHAT else "embedding"

    @property
    def need_mib(self) -> int:
        """Memory it takes, MiB: as large as its files, and its KV cache where it has one; the same for who drafts for it."""
        size = self.file.size + self.loras_bytes
        if isinstance(self.engine, EmbedConfig):
            return -(-size // MIB)
        config = self.engine
        kv_type = largest_kv_type(config.tuning)
        own_mib = need_mib(self.file.header, file_bytes=size, cells=config.context_cells, kv_type=kv_type)
        if self.draft is None:
            return own_mib
        draft_bytes = self.draft.size
        return own_mib + need_mib(self.draft.header, file_bytes=draft_bytes, cells=config.context_cells, kv_type="f16")

    @property
    def developer_role(self) -> bool:
        """Whether the model's template knows the role developer."""
        return "developer" in (self.text.template or self.file.header.template)

    @property
    def context_tokens(self) -> int:
        """Most tokens of one request, as far as is known before it is loaded."""
        if isinstance(self.engine, EmbedConfig):
            return self.engine.input_tokens
        config = self.engine
        limits = (config.context_cells, config.context_tokens, self.file.header.context_tokens)
        return min(limit for limit in limits if limit > 0)

    def runs_like(self, other: "Served") -> bool:
        """Return whether a host of this one is as good for the other."""
        return (self.engine, self.text, self.file, self.draft, self.entry.kind) == (
            other.engine,
            other.text,
            other.file,
            other.draft,
            other.entry.kind,
        )


def read_served(settings: LlmSettings) -> tuple[Served, ...]:
    """Return the models, the default one first: those of omniserve.yaml, or else the one of the settings.

    Raises ConfigError with the line, and ModelFileError for the one of the settings.
    """
    document = config.read(settings.config).without("models", is_others)
    sections = document.section("models", ModelsSection)
    if not sections:
        found = (from_settings(settings), *embeddings_of(settings))
        needed_mib = sum(each.need_mib for each in found)
        if 0 < settings.memory_mib < needed_mib:
            message = f"is {settings.memory_mib}; the models of the settings, which stay, need {needed_mib}"
            raise ConfigError([Fault("", None, "OMNISERVE_LLM_MEMORY_MIB", message)])
        return found
    if settings.gguf is not None:
        message = "and OMNISERVE_LLM_GGUF both say what is served; keep one of them"
        raise ConfigError([document.fault(("models",), message)])
    if settings.spec_draft_gguf is not None:
        message = "have each their own `draft`; OMNISERVE_LLM_SPEC_DRAFT_GGUF is for the one model of the settings"
        raise ConfigError([document.fault(("models",), message)])
    found = _from_sections(settings, document, sections)
    if all(each.entry.kind is Kind.CHAT for each in found):
        found += embeddings_of(settings)
    elif settings.embedding_gguf not in {"", "none"} or settings.rerank_gguf is not None:
        message = "and OMNISERVE_EMBEDDING_GGUF or OMNISERVE_RERANK_GGUF both say what makes vectors; keep one of them"
        raise ConfigError([document.fault(("models",), message)])
    _check_memory(settings.memory_mib, document, found)
    return found


def from_settings(settings: LlmSettings) -> Served:
    """Return the one model of the settings: it is loaded at the start and stays. Raises ModelFileError."""
    file = model_file.read(settings.gguf or model_file.default_path())
    draft = None if settings.spec_draft_gguf is None else _draft(settings.spec_draft_gguf, file)
    return Served(
        entry=entry(file.path.stem, name=settings.model_name, aliases=settings.model_aliases),
        file=file,
        engine=engine_config(settings, file, draft),
        draft=draft,
        text=text_config(settings, file, model_file.read_template(settings.chat_template)),
        sampling=sampling(settings),
        system=settings.system(),
        pinned=True,
        preload=True,
        required=True,
        is_fixed=bool(settings.model_name),
    )


def _from_sections(settings: LlmSettings, document: Document, sections: Sequence[ModelSection]) -> tuple[Served, ...]:
    faults: list[Fault] = []
    found: list[Served] = []
    for place, section in enumerate(sections):
        path: config.Place = ("models", place)
        try:
            found.append(_from_section(settings, Path(document.file).parent, section))
        except ModelFileError as error:
            faults.append(document.fault((*path, "path"), str(error)))
        except ValueError as error:
            faults.append(document.fault(path, str(error)))
    entries = [Entry(each.name, each.aliases) for each in sections]
    for place, name, owner in repeated(entries):
        field = "name" if name == sections[place].name else "aliases"
        faults.append(document.fault(("models", place, field), f"{name!r} is a name of {owner!r} already"))
    if faults:
        raise ConfigError(faults)
    return tuple(found)


def _check_memory(budget_mib: int, document: Document, found: Sequence[Served]) -> None:
    faults = list(_misfits(budget_mib, document, found))
    if faults:
        raise ConfigError(faults)


def _misfits(budget_mib: int, document: Document, found: Sequence[Served]) -> Iterator[Fault]:
    """Return a fault for each model that the memory is too small for, whatever leaves it."""
    if budget_mib == 0:
        return
    pinned_mib = sum(each.need_mib for each in found if each.pinned)
    for place, each in enumerate(found):
        most_mib = budget_mib - pinned_mib + (each.need_mib if each.pinned else 0)
        if each.need_mib > most_mib:
            message = (
                f"needs {each.need_mib} MiB; OMNISERVE_LLM_MEMORY_MIB is {budget_mib}, pinned models leave {most_mib}"
            )
            yield document.fault(("models", place), message)
    preloaded_mib = sum(each.need_mib for each in found if each.preload)
    if preloaded_mib > budget_mib:
        message = f"those to preload need {preloaded_mib} MiB together; OMNISERVE_LLM_MEMORY_MIB is {budget_mib}"
        yield document.fault(("models",), message)


def _from_section(settings: LlmSettings, folder: Path, section: ModelSection) -> Served:
    file = model_file.read(folder / section.path.expanduser())
    kind = Kind(section.kind or file.header.kind)
    if kind is not Kind.CHAT:
        return _embedding(settings, section, file, kind)
    if section.pooling is not None:
        raise ValueError("has `pooling`, which is for models that make vectors")
    names = ("ctx", "request_ctx", "contexts", "warm_prefixes", "ngl", "kv_type", "threads")
    if section.ctx is not None and section.ctx < _LEAST_CELLS:
        raise ValueError(f"has `ctx` {section.ctx}; a model that generates text needs {_LEAST_CELLS} at least")
    own = {name: value for name in names if (value := getattr(section, name)) is not None}
    theirs = settings.model_copy(update=own)
    if (misfit := theirs.misfit()) is not None:
        raise ValueError(misfit)
    draft = None if section.draft is None else _draft(folder / section.draft.expanduser(), file)
    if draft is not None and settings.spec_draft == 0:
        raise ValueError("has a `draft`, and OMNISERVE_LLM_SPEC_DRAFT is 0, which turns speculation off")
    loras = {name: _adapter(folder / path.expanduser(), file) for name, path in section.loras.items()}
    chosen = section.sampling.model_dump(exclude_none=True)
    system = settings.own_system() if section.system is None else section.system
    return Served(
        entry=Entry(section.name, tuple(dict.fromkeys(section.aliases)), kind),
        file=file,
        engine=msgspec.structs.replace(
            engine_config(theirs, file, draft), loras={name: str(each.path) for name, each in loras.items()}
        ),
        text=text_config(theirs, file),
        draft=draft,
        loras_bytes=sum(each.size for each in loras.values()),
        sampling=msgspec.structs.replace(sampling(settings), **chosen),
        system=None if system == "none" else system,
        ttl_s=section.ttl_s,
        pinned=section.pin,
        preload=section.preload,
        required=section.preload,
    )


def _embedding(settings: LlmSettings, section: ModelSection, file: ModelFile, kind: Kind) -> Served:
    for name in _CHAT_ONLY & section.model_fields_set:
        raise ValueError(f"is of kind {kind.value} and has `{name}`, which is for models that generate text")
    if (kind is Kind.RERANK) != (file.header.pooling == "rank"):
        raise ValueError(f"is of kind {kind.value}, but its file pools by {file.header.pooling or 'nothing'}")
    return embedding(
        settings,
        file,
        Entry(section.name, tuple(dict.fromkeys(section.aliases)), kind),
        pooling=section.pooling or "",
        ctx=section.ctx,
        ngl=section.ngl,
        threads=section.threads,
        ttl_s=section.ttl_s,
        pinned=section.pin,
        preload=section.preload,
        required=section.preload,
    )


def embeddings_of(settings: LlmSettings) -> tuple[Served, ...]:
    """Return the embedding models of the settings; they are loaded at the start and stay. Raises ModelFileError."""
    found = []
    path = embedding_path(settings)
    if path is not None:
        file = model_file.read(path)
        kind = Kind.RERANK if settings.embedding_pooling == "auto" and file.header.pooling == "rank" else Kind.EMBEDDING
        pooling = "" if settings.embedding_pooling == "auto" else settings.embedding_pooling
        named = replace(entry(file.path.stem, name="", aliases=()), kind=kind)
        found.append(embedding(settings, file, named, pooling=pooling, pinned=True, preload=True))
    if settings.rerank_gguf is not None:
        file = model_file.read(settings.rerank_gguf)
        if file.header.pooling != "rank":
            raise ModelFileError(f"{settings.rerank_gguf}: no cross-encoder: its pooling type is not rank")
        named = replace(entry(file.path.stem, name="", aliases=()), kind=Kind.RERANK)
        found.append(embedding(settings, file, named, pooling="", pinned=True, preload=True))
    return tuple(found)


def embedding_path(settings: LlmSettings) -> Path | None:
    """Return the embedding model's file: the one that is set, or the default if set-up has made it."""
    if settings.embedding_gguf == "none":
        return None
    if settings.embedding_gguf:
        return Path(settings.embedding_gguf)
    default = settings.models_dir / DEFAULT_EMBEDDING
    return default if default.exists() else None


def embedding(
    settings: LlmSettings,
    file: ModelFile,
    named: Entry,
    *,
    pooling: str,
    ctx: int | None = None,
    ngl: Literal["auto"] | int | None = None,
    threads: int | None = None,
    ttl_s: float = 0.0,
    pinned: bool = False,
    preload: bool = False,
    required: bool = False,
) -> Served:
    """Return a model that makes vectors or scores pairs; what is None is as the settings say."""
    asked_ctx = settings.embedding_ctx if ctx is None else ctx
    layers = settings.embedding_ngl if ngl is None else ngl
    config = EmbedConfig(
        path=str(file.path),
        layers=file.header.layers,
        input_tokens=min(asked_ctx, file.header.context_tokens or asked_ctx),
        batch_tokens=settings.embedding_batch,
        pooling=pooling,
        threads=settings.embedding_threads if threads is None else threads,
        cores=settings.compute_threads(),
        shares_cores=settings.ngl == 0,
        gpu_layers=None if layers == "auto" else layers,
        keep_free_mib=settings.ngl_auto_keep_free_mb,
        allow_cpu_fallback=settings.allow_cpu_fallback,
    )
    return Served(
        entry=named,
        file=file,
        engine=config,
        text=text_config(settings, file),
        sampling=sampling(settings),
        system=None,
        ttl_s=ttl_s,
        pinned=pinned,
        preload=preload,
        required=required,
    )


def _draft(path: Path, model: ModelFile) -> ModelFile:
    """Return a checked model that drafts for another. Raises ModelFileError."""
    file = model_file.read(path)
    if file.header.kind != Kind.CHAT.value or file.header.is_lora:
        raise ModelFileError(f"{path}: does not generate text, so it cannot draft")
    theirs, ours = file.header.vocabulary_tokens, model.header.vocabulary_tokens
    if abs(theirs - ours) > MOST_UNLIKE_TOKENS:
        raise ModelFileError(
            f"{path}: knows {theirs} tokens, {model.path} {ours}; who drafts needs the same vocabulary"
        )
    return file


def _adapter(path: Path, model: ModelFile) -> ModelFile:
    """Return a checked LoRA adapter of a model. Raises ModelFileError and ValueError."""
    file = model_file.read(path)
    if not file.header.is_lora:
        raise ValueError(f"{path} is no LoRA adapter")
    if file.header.architecture != model.header.architecture:
        theirs, ours = file.header.architecture, model.header.architecture
        raise ValueError(f"{path} adapts models of architecture {theirs!r}; this one is {ours!r}")
    return file


def sampling(settings: LlmSettings) -> Sampling:
    """Return how tokens are chosen when nobody says anything else."""
    return Sampling(temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, min_p=settings.min_p)


def text_config(settings: LlmSettings, file: ModelFile, template: str = "") -> TextConfig:
    """Return the text host's configuration. `template`: instead of the file's own."""
    return TextConfig(str(file.path), settings.template_s, settings.prompt_bytes, settings.text_memory_mib, template)


def engine_config(settings: LlmSettings, file: ModelFile, draft: ModelFile | None) -> EngineConfig:
    """Return the engine host's configuration. `draft`: the model that drafts for it."""
    return EngineConfig(
        path=str(file.path),
        layers=file.header.layers,
        context_cells=settings.ctx,
        context_tokens=settings.request_ctx,
        slots=settings.contexts,
        warm_sequences=settings.warm_prefixes,
        tuning=settings.tuning(),
        threads=settings.compute_threads(),
        gpu_layers=None if settings.ngl == "auto" else settings.ngl,
        keep_free_mib=settings.ngl_auto_keep_free_mb,
        allow_cpu_fallback=settings.allow_cpu_fallback,
        stall_s=settings.stall_ms / 1000,
        stall_ratio=settings.stall_ratio,
        flush_s=settings.flush_ms / 1000,
        govern_threads=settings.govern_threads,
        stored_prefix_bytes=settings.prefix_ram_mib * MIB,
        speculation=SpeculationRules(
            draft=settings.spec_draft,
            min_ngram=settings.spec_min_ngram,
            max_ngram=settings.spec_max_ngram,
            patience=settings.spec_patience,
            probe=settings.spec_probe,
            lookup=settings.spec_lookup,
        ),
        draft_model=None
        if draft is None
        else DraftModelConfig(str(draft.path), draft.header.layers, settings.spec_draft_min_p),
    )
