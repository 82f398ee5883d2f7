"""Embeddings and reranking from request to usage: check, tokenize, wait for the permit, compute, give everything back."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace

from services.kit import telemetry
from services.kit.access import Caller
from services.kit.errors import DomainError, Reason
from services.llm.adapters.embedder import Embedder, UnfitInputError
from services.llm.adapters.model_file import ModelFile
from services.llm.core.catalogue import Entry
from services.llm.core.embed_wire import EmbedCounters, EmbedReady, Item
from services.llm.core.embedding import (
    EmbedWork,
    Input,
    Ranked,
    RerankWork,
    Vectors,
    best,
    by_similarity,
    check_embed,
    check_rerank,
    shaped,
    unfit,
)
from services.llm.core.wire import pack_tokens
from services.llm.generate import Waits
from services.llm.hosting import Permits


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """One model with its host. `is_reranker`: its file says so, or its settings do. `width`: of its vectors."""

    entry: Entry
    file: ModelFile
    embedder: Embedder
    is_reranker: bool
    width: int
    input_tokens: int
    gpu_layers_asked: int | None


@dataclass(frozen=True, slots=True)
class Embedded:
    """Answer to Embed: a row for each input."""

    vectors: Vectors
    tokens: int
    model: str


@dataclass(frozen=True, slots=True)
class Reranked:
    """Answer to Rerank: best first."""

    results: list[Ranked]
    tokens: int
    model: str


class Embeddings:
    """Runs the embedding and reranking models, the default ones first."""

    def __init__(self, models: Sequence[EmbeddingModel], permits: Permits, waits: Waits) -> None:
        self.models = tuple(models)
        self.draining = False
        self._permits = permits
        self._waits = waits

    async def supervise(self) -> None:
        """Keep every model's host running until cancelled. Raises EngineUnusableError when one can never start."""
        async with asyncio.TaskGroup() as tasks:
            for model in self.models:
                tasks.create_task(model.embedder.supervise())

    async def counters(self, *, wait_s: float) -> list[tuple[EmbeddingModel, EmbedCounters]]:
        """Return each model with its counters, asked for all at once."""
        counts = await asyncio.gather(*(model.embedder.counters(wait_s=wait_s) for model in self.models))
        return list(zip(self.models, counts, strict=True))

    async def embed(self, work: EmbedWork, caller: Caller) -> Embedded:
        """Return a vector for each input. Raises DomainError."""
        model = self._model(work.model, rerankers=False)
        if model.is_reranker:
            message = f"the model {model.entry.name!r} scores pairs of texts; this needs one that makes vectors"
            raise DomainError(Reason.INVALID_REQUEST, message, field="model")
        ready = await model.embedder.ready(wait_s=self._waits.load_s)
        check_embed(work, vocabulary=ready.vocabulary, width=ready.width, prompt_bytes=self._waits.prompt_bytes)
        items = [_item(each) for each in work.inputs]
        with _span("embeddings", model.entry.name, ready) as span:
            vectors, tokens = await self._compute(model, items, caller, field="inputs", truncate=work.truncate)
            span.set_attribute("gen_ai.usage.input_tokens", tokens)
        return Embedded(shaped(vectors, dimensions=work.dimensions, raw=work.raw), tokens, model.entry.name)

    async def rerank(self, work: RerankWork, caller: Caller) -> Reranked:
        """Return the documents by their score: the model's own, or the cosine with the query. Raises DomainError."""
        model = self._model(work.model, rerankers=True)
        check_rerank(work, prompt_bytes=self._waits.prompt_bytes)
        ready = await model.embedder.ready(wait_s=self._waits.load_s)
        with _span("rerank", model.entry.name, ready) as span:
            if model.is_reranker:
                items = [Item(text=document, query=work.query) for document in work.documents]
                vectors, tokens = await self._compute(model, items, caller, field="documents")
                scores = [float(score) for score in vectors[:, 0]]
            else:
                items = [Item(text=text) for text in (work.query, *work.documents)]
                vectors, tokens = await self._compute(model, items, caller, field="query")
                scores = by_similarity(vectors)
            span.set_attribute("gen_ai.usage.input_tokens", tokens)
        return Reranked(best(scores, work.top_n), tokens, model.entry.name)

    async def _compute(
        self, model: EmbeddingModel, items: Sequence[Item], caller: Caller, *, field: str, truncate: bool = False
    ) -> tuple[Vectors, int]:
        """Return the vectors and how many tokens they took. `field`: of the request, whose item is at fault if one is."""
        try:
            async with (
                model.embedder.prepare(items, truncate=truncate) as batch,
                self._permits.permit(
                    modality="embedding",
                    tier=caller.tier,
                    principal=caller.client,
                    request_id=caller.request_id,
                ),
            ):
                return await batch.compute(wait_s=self._waits.load_s), batch.tokens
        except UnfitInputError as error:
            raise unfit(_place(field, error.place), tokens=error.tokens, limit=error.limit) from None

    def _model(self, name: str, *, rerankers: bool) -> EmbeddingModel:
        """Return the model of that name; "" is the first, of `rerankers` if there are any and they are preferred."""
        if self.draining:
            raise DomainError(Reason.DRAINING, "the service is stopping", retry_after_ms=5_000)
        if not name:
            fitting = [model for model in self.models if model.is_reranker is rerankers]
            found = [*fitting, *(model for model in self.models if rerankers)]
        else:
            found = [model for model in self.models if name in (model.entry.name, *model.entry.aliases)]
        if found:
            return found[0]
        if not self.models:
            message = (
                "no embedding model is configured: set OMNISERVE_EMBEDDING_GGUF, or run `make setup` for the default"
            )
            raise DomainError(Reason.NOT_FOUND, message, field="model")
        known = ", ".join(repr(model.entry.name) for model in self.models)
        message = f"there is no embedding model {name[:100]!r}; {known} can be asked for"
        raise DomainError(Reason.NOT_FOUND, message, field="model", metadata={"model": name[:100]})


def _item(asked: Input) -> Item:
    return Item(text=asked.text) if asked.tokens is None else Item(tokens=pack_tokens(asked.tokens))


def _place(field: str, place: int) -> str:
    """Return the path of an item; with `query`, that is the first one and the documents follow."""
    if field != "query":
        return f"{field}[{place}]"
    return "query" if place == 0 else f"documents[{place - 1}]"


@contextmanager
def _span(operation: str, model: str, ready: EmbedReady) -> Iterator[trace.Span]:
    """Record a span; costs nothing while tracing is off."""
    if not telemetry.tracing():
        yield trace.INVALID_SPAN
        return
    with telemetry.tracer(__name__).start_as_current_span(
        f"{operation} {model}",
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "llama.cpp",
            "gen_ai.request.model": model,
            "gen_ai.embeddings.dimension.count": ready.width,
        },
        record_exception=False,
    ) as span:
        yield span
