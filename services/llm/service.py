"""The gRPC servicers: messages in, values to those who decide, messages out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio
from typing_extensions import override

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.access import caller_of
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.lifecycle import State
from services.llm import embed_translate, translate
from services.llm.adapters.text import Text
from services.llm.core.catalogue import Kind
from services.llm.core.options import check_tokens
from services.llm.core.prompt import Chat, Completion
from services.llm.embed import Embeddings
from services.llm.generate import Generator, Work
from services.llm.outbox import Outbox, Port
from services.llm.resident import Resident
from services.llm.session import Session

SERVICES: Final = ("omniserve.llm.v1.LlmService", "omniserve.llm.v1.LlmAdminService")
_COUNTERS_WAIT_S: Final = 0.5

Context = grpc.aio.ServicerContext[Any, Any]


class LlmServicer(llm_pb2_grpc.LlmServiceServicer):
    """omniserve.llm.v1.LlmService."""

    def __init__(self, generator: Generator, embeddings: Embeddings) -> None:
        self._generator = generator
        self._embeddings = embeddings
        self._residents = generator.residents
        self._sessions: set[Session] = set()

    @override
    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """See the contract; writes to the context itself, since events come from several sides."""
        work = _work(request.model, translate.chat(request), request.options, context)
        await self._stream(work, context, pb.ChatResponse)

    @override
    async def Complete(self, request: pb.CompleteRequest, context: Context) -> None:  # type: ignore[override]
        """See the contract."""
        work = _work(request.model, translate.completion(request), request.options, context)
        await self._stream(work, context, pb.CompleteResponse)

    async def _stream(
        self, work: Work, context: Context, response: type[pb.ChatResponse | pb.CompleteResponse]
    ) -> None:
        outbox = Outbox()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run(work, outbox))
            while events := await outbox.take():
                for said in events:
                    await context.write(response(**{said.kind: said.message}))  # type: ignore[arg-type]

    async def _run(self, work: Work, outbox: Outbox) -> None:
        try:
            await self._generator.run(work, Port(outbox, 0))
        finally:
            outbox.close()

    @override
    async def GenerateSession(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.GenerateSessionRequest], context: Context
    ) -> None:
        """See the contract."""
        session = Session(self._generator)
        self._sessions.add(session)
        try:
            await session.serve(request_iterator, context.write)
        finally:
            self._sessions.discard(session)

    @override
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """See the contract."""
        resident = self._any(request.model)
        with self._residents.visit(resident):
            found, prompt = await self._tokenized(request, resident)
            return pb.TokenizeResponse(
                tokens=found.tokens.tolist(),
                pieces=await resident.text.pieces(found.tokens),
                prompt=prompt,
                context_tokens=resident.context_tokens,
            )

    async def _tokenized(self, request: pb.TokenizeRequest, resident: Resident) -> tuple[Text, str | None]:
        """Return the tokens, and for a chat the text after templating."""
        vocabulary = await self._generator.vocabulary(resident)
        kind = request.WhichOneof("input")
        if kind is None:
            raise DomainError(Reason.INVALID_REQUEST, "'text' or 'chat' must be given", field="text")
        if kind == "chat":
            found = await self._generator.prompt(translate.chat(request.chat), resident, vocabulary)
            return found, found.prompt
        self._generator.check_size("text", len(request.text))
        special = request.parse_special if request.HasField("parse_special") else True
        # An embedding model reads every text between its own tokens, not after one.
        whole = request.add_special and resident.served.entry.kind is not Kind.CHAT
        found = await resident.text.tokenize(
            request.text, begin=request.add_special, parse_special=special, whole=whole
        )
        return found, None

    @override
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """See the contract."""
        resident = self._any(request.model)
        with self._residents.visit(resident):
            vocabulary = await self._generator.vocabulary(resident)
            check_tokens("tokens", list(request.tokens), vocabulary.vocabulary)
            pieces = await resident.text.pieces(translate.tokens(request.tokens))
        return pb.DetokenizeResponse(text=b"".join(pieces).decode("utf-8", "replace"))

    def _any(self, model: str) -> Resident:
        """Return a model of whatever kind by its name; "" is the default one."""
        return self._residents.find(model, *(Kind if model else (Kind.CHAT,)))

    @override
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """See the contract."""
        answer = await self._embeddings.embed(embed_translate.embed_work(request), caller_of(context))
        return embed_translate.embedded(answer)

    @override
    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        """See the contract."""
        answer = await self._embeddings.rerank(embed_translate.rerank_work(request), caller_of(context))
        return embed_translate.reranked(answer)

    @override
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """See the contract."""
        return pb.ListModelsResponse(models=[translate.model(each) for each in self._residents.catalogue])

    @override
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """See the contract."""
        hosted = [each for each in self._residents.catalogue if each.host.report.state is not State.AVAILABLE]
        engines = await asyncio.gather(*(_status(each) for each in hosted))
        return pb.GetStatusResponse(engines=engines, draining=self._generator.draining)

    async def drain(self) -> None:
        """Take no new requests; sessions end when their running ones have."""
        self._generator.draining = True
        self._embeddings.draining = True
        for session in self._sessions:
            session.drain()


async def _status(resident: Resident) -> pb.EngineStatus:
    if resident.served.entry.kind is Kind.CHAT:
        return translate.status(resident, await resident.engine.counters(wait_s=_COUNTERS_WAIT_S))
    return embed_translate.status(resident, await resident.embedder.counters(wait_s=_COUNTERS_WAIT_S))


def _work(model: str, content: Chat | Completion, options: pb.Options, context: Context) -> Work:
    caller = caller_of(context)
    return Work(model, content, translate.options(options), caller.client, caller.tier, caller.request_id)
