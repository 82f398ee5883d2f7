"""Embeddings and reranking from request to usage: check, tokenize, wait for the permit, compute, give everything back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace

from services.kit import telemetry
from services.kit.access import Caller
from services.kit.errors import DomainError, Reason
from services.kit.hosts.residents import Asker, ReplacedError
from services.llm.adapters.embedder import UnfitInputError
from services.llm.core.catalogue import Kind
from services.llm.core.embed_wire import EmbedReady, Item
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
from services.llm.resident import Resident
from services.llm.residents import Residents


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
    """Answers from the models that make vectors or score pairs."""

    def __init__(self, residents: Residents, waits: Waits) -> None:
        self.draining = False
        self._residents = residents
        self._waits = waits

    async def embed(self, work: EmbedWork, caller: Caller) -> Embedded:
        """Return a vector for each input. Raises DomainError."""
        while True:
            model = self._model(work.model, Kind.EMBEDDING)
            try:
                return await self._embed(model, work, caller)
            except ReplacedError:
                continue

    async def _embed(self, model: Resident, work: EmbedWork, caller: Caller) -> Embedded:
        def check(ready: EmbedReady) -> None:
            check_embed(work, vocabulary=ready.vocabulary, width=ready.width, prompt_bytes=self._waits.prompt_bytes)

        items = [_item(each) for each in work.inputs]
        with _span("embeddings", model) as span:
            vectors, tokens = await self._compute(
                model, items, caller, field="inputs", truncate=work.truncate, check=check
            )
            span.set_attribute("gen_ai.usage.input_tokens", tokens)
        return Embedded(shaped(vectors, dimensions=work.dimensions, raw=work.raw), tokens, model.name)

    async def rerank(self, work: RerankWork, caller: Caller) -> Reranked:
        """Return the documents by their score: the model's own, or the cosine with the query. Raises DomainError."""
        while True:
            model = self._model(work.model, Kind.RERANK, Kind.EMBEDDING)
            check_rerank(work, prompt_bytes=self._waits.prompt_bytes)
            try:
                return await self._rerank(model, work, caller)
            except ReplacedError:
                continue

    async def _rerank(self, model: Resident, work: RerankWork, caller: Caller) -> Reranked:
        with _span("rerank", model) as span:
            if model.served.entry.kind is Kind.RERANK:
                items = [Item(text=document, query=work.query) for document in work.documents]
                vectors, tokens = await self._compute(model, items, caller, field="documents")
                scores = [float(score) for score in vectors[:, 0]]
            else:
                items = [Item(text=text) for text in (work.query, *work.documents)]
                vectors, tokens = await self._compute(model, items, caller, field="query")
                scores = by_similarity(vectors)
            span.set_attribute("gen_ai.usage.input_tokens", tokens)
        return Reranked(best(scores, work.top_n), tokens, model.name)

    async def _compute(
        self,
        model: Resident,
        items: Sequence[Item],
        caller: Caller,
        *,
        field: str,
        truncate: bool = False,
        check: Callable[[EmbedReady], None] = lambda _: None,
    ) -> tuple[Vectors, int]:
        """Return the vectors and how many tokens they took. `field`: of the request, whose item is at fault if one is."""
        use = self._residents.use(
            model,
            Asker(caller.tier, caller.client, caller.request_id, may_wait=True),
            on_queued=lambda _position, _eta_ms: None,
            on_loading=lambda _progress: None,
        )
        embedder = model.embedder
        try:
            ready = embedder.report.ready
            if ready is not None and self._residents.is_usable(model):
                check(ready)
                # Tokenized before the permit is asked for, so that nobody holds one meanwhile.
                async with embedder.prepare(items, truncate=truncate) as batch, use:
                    return await batch.compute(wait_s=self._waits.load_s), batch.tokens
            async with use:
                check(await embedder.ready(wait_s=self._waits.load_s))
                async with embedder.prepare(items, truncate=truncate) as batch:
                    return await batch.compute(wait_s=self._waits.load_s), batch.tokens
        except UnfitInputError as error:
            raise unfit(_place(field, error.place), tokens=error.tokens, limit=error.limit) from None

    def _model(self, name: str, *kinds: Kind) -> Resident:
        """Return the model of that name; "" is the first of the first kind that there is one of."""
        if self.draining:
            raise DomainError(Reason.DRAINING, "the service is stopping", retry_after_ms=5_000)
        served = [each.served.entry.kind for each in self._residents.catalogue]
        if not any(kind in served for kind in kinds):
            message = (
                "no embedding model is configured: set OMNISERVE_EMBEDDING_GGUF, or run `make setup` for the default"
            )
            raise DomainError(Reason.NOT_FOUND, message, field="model")
        preferred = next(kind for kind in kinds if kind in served)
        return self._residents.find(name, *(kinds if name else (preferred,)))


def _item(asked: Input) -> Item:
    return Item(text=asked.text) if asked.tokens is None else Item(tokens=pack_tokens(asked.tokens))


def _place(field: str, place: int) -> str:
    """Return the path of an item; with `query`, that is the first one and the documents follow."""
    if field != "query":
        return f"{field}[{place}]"
    return "query" if place == 0 else f"documents[{place - 1}]"


@contextmanager
def _span(operation: str, model: Resident) -> Iterator[trace.Span]:
    """Record a span; costs nothing while tracing is off."""
    if not telemetry.tracing():
        yield trace.INVALID_SPAN
        return
    with telemetry.tracer(__name__).start_as_current_span(
        f"{operation} {model.name}",
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "llama.cpp",
            "gen_ai.request.model": model.name,
            "gen_ai.embeddings.dimension.count": model.served.file.header.embedding_width,
        },
        record_exception=False,
    ) as span:
        yield span
