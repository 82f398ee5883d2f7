"""Putting the embedding models together from the settings."""

from pathlib import Path
from typing import Final

from services.kit.clock import Clock
from services.llm.adapters import model_file
from services.llm.adapters.embedder import Embedder
from services.llm.adapters.engine import EngineLimits
from services.llm.adapters.model_file import ModelFileError
from services.llm.core.catalogue import entry
from services.llm.core.embed_wire import EmbedConfig
from services.llm.core.gguf import Header
from services.llm.embed import EmbeddingModel, Embeddings
from services.llm.generate import Waits
from services.llm.hosting import Permits
from services.llm.settings import LlmSettings

_RANK: Final = 4  # llama.cpp's LLAMA_POOLING_TYPE_RANK
DEFAULT_FILE: Final = "all-MiniLM-L6-v2.Q8_0.gguf"
"""What set-up puts into the models folder."""


def build_embeddings(settings: LlmSettings, permits: Permits, clock: Clock, *, environ: dict[str, str]) -> Embeddings:
    """Read the files' headers and return the models; each `supervise` is still to be run. Raises ModelFileError."""
    models = []
    path = embedding_path(settings)
    if path is not None:
        models.append(embedding_model(settings, clock, path, pooling=settings.embedding_pooling, environ=environ))
    if settings.rerank_gguf is not None:
        found = embedding_model(settings, clock, settings.rerank_gguf, pooling="auto", environ=environ)
        if not found.is_reranker:
            raise ModelFileError(f"{settings.rerank_gguf}: no cross-encoder: its pooling type is not rank")
        models.append(found)
    return Embeddings(models, permits, Waits(settings.load_wait_s, settings.prompt_bytes))


def embedding_path(settings: LlmSettings) -> Path | None:
    """Return the embedding model's file: the one that is set, or the default if set-up has made it."""
    if settings.embedding_gguf == "none":
        return None
    if settings.embedding_gguf:
        return Path(settings.embedding_gguf)
    default = settings.models_dir / DEFAULT_FILE
    return default if default.exists() else None


def embedding_model(
    settings: LlmSettings, clock: Clock, path: Path, *, pooling: str, environ: dict[str, str]
) -> EmbeddingModel:
    """Read a file's header and return the model. Raises ModelFileError."""
    file = model_file.read(path)
    header = file.header
    layers = None if settings.embedding_ngl == "auto" else settings.embedding_ngl
    input_tokens = min(settings.embedding_ctx, header.context_tokens or settings.embedding_ctx)
    embedder = Embedder(
        EmbedConfig(
            path=str(file.path),
            layers=header.layers,
            input_tokens=input_tokens,
            batch_tokens=settings.embedding_batch,
            pooling="" if pooling == "auto" else pooling,
            threads=settings.embedding_threads,
            cores=settings.compute_threads(),
            shares_cores=settings.ngl == 0,
            gpu_layers=layers,
            keep_free_mib=settings.ngl_auto_keep_free_mb,
            allow_cpu_fallback=settings.allow_cpu_fallback,
        ),
        EngineLimits(load_s=settings.load_timeout_s, stuck_s=settings.stuck_s),
        clock,
        environ=environ,
    )
    return EmbeddingModel(
        entry=entry(file.path.stem, name="", aliases=()),
        file=file,
        embedder=embedder,
        is_reranker=pooling == "auto" and _number(header, "pooling_type") == _RANK,
        width=_number(header, "embedding_length"),
        input_tokens=input_tokens,
        gpu_layers_asked=layers if layers is not None and layers >= 0 else None,
    )


def _number(header: Header, key: str) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    return value if isinstance(value, int) else 0
