"""The gRPC servicers: messages in, values to those who decide, messages out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn

import grpc.aio
from typing_extensions import override

from omniserve.llm.v1 import llm_pb2 as pb
from omniserve.llm.v1 import llm_pb2_grpc
from services.kit.access import caller_of
from services.kit.errors import DomainError, Reason
from services.llm import translate
from services.llm.adapters.model_file import ModelFile
from services.llm.core.catalogue import check_name
from services.llm.core.options import check_tokens
from services.llm.core.prompt import Chat, Completion
from services.llm.core.wire import TextReady
from services.llm.generate import Generator, Work
from services.llm.outbox import Outbox, Port
from services.llm.session import Session
from services.llm.settings import LlmSettings

SERVICES: Final = ("omniserve.llm.v1.LlmService", "omniserve.llm.v1.LlmAdminService")
_COUNTERS_WAIT_S: Final = 0.5

Context = grpc.aio.ServicerContext[Any, Any]


class LlmServicer(llm_pb2_grpc.LlmServiceServicer):
    """omniserve.llm.v1.LlmService."""

    def __init__(self, generator: Generator, file: ModelFile, settings: LlmSettings) -> None:
        self._generator = generator
        self._file = file
        self._settings = settings
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
            await self._generator.run(work, Port(outbox, 0, self._generator.entry.name))
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
        vocabulary = await self._vocabulary(request.model)
        text = self._generator.text
        kind = request.WhichOneof("input")
        if kind is None:
            raise DomainError(Reason.INVALID_REQUEST, "'text' or 'chat' must be given", field="text")
        if kind == "chat":
            found = await self._generator.prompt(translate.chat(request.chat), vocabulary)
        else:
            self._generator.check_size("text", len(request.text))
            special = request.parse_special if request.HasField("parse_special") else True
            found = await text.tokenize(request.text, begin=request.add_special, parse_special=special)
        return pb.TokenizeResponse(
            tokens=found.tokens.tolist(),
            pieces=await text.pieces(found.tokens),
            prompt=found.prompt if kind == "chat" else None,
            context_tokens=self._context_tokens(),
        )

    @override
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """See the contract."""
        vocabulary = await self._vocabulary(request.model)
        check_tokens("tokens", list(request.tokens), vocabulary.vocabulary)
        pieces = await self._generator.text.pieces(translate.tokens(request.tokens))
        return pb.DetokenizeResponse(text=b"".join(pieces).decode("utf-8", "replace"))

    async def _vocabulary(self, model: str) -> TextReady:
        check_name(model, self._generator.entry)
        return await self._generator.text.vocabulary(wait_s=self._settings.load_wait_s)

    @override
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> NoReturn:
        """Refuse: no embedding model can be configured yet."""
        raise DomainError(Reason.UNSUPPORTED, "embeddings are not supported by this server yet", field="model")

    @override
    async def Rerank(self, request: pb.RerankRequest, context: Context) -> NoReturn:
        """Refuse: no reranking model can be configured yet."""
        raise DomainError(Reason.UNSUPPORTED, "reranking is not supported by this server yet", field="model")

    @override
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """See the contract."""
        return pb.ListModelsResponse(models=[self.model()])

    @override
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """See the contract."""
        generator, settings = self._generator, self._settings
        now = await generator.engine.counters(wait_s=_COUNTERS_WAIT_S)
        ready = generator.engine.report.ready
        tune = pb.Tune(
            profile="cpu" if ready is None or ready.gpu_layers == 0 else "",
            batch_tokens=settings.batch,
            ubatch_tokens=min(settings.ubatch, settings.batch),
            threads=now.threads,
            flash_attention=ready is not None and ready.flash_attention,
        )
        status = translate.status(
            generator.entry,
            generator.engine.report,
            now,
            slots=settings.contexts,
            placement=translate.placement(ready, settings.ngl, settings.kv_type),
            tune=tune,
        )
        return pb.GetStatusResponse(engines=[status], draining=generator.draining)

    def model(self) -> pb.Model:
        """Return the catalogue's entry with its state."""
        report = self._generator.engine.report
        return translate.model(
            self._generator.entry,
            self._file.header,
            size=self._file.size,
            made_unix_s=self._file.made_unix_s,
            state=report.state,
            context_tokens=self._context_tokens(),
            failure=report.failure,
        )

    def _context_tokens(self) -> int:
        ready = self._generator.engine.report.ready
        if ready is not None:
            return ready.context_tokens
        limits = (self._settings.ctx, self._settings.request_ctx, self._file.header.context_tokens)
        return min(limit for limit in limits if limit > 0)

    async def drain(self) -> None:
        """Take no new requests; sessions end when their running ones have."""
        self._generator.draining = True
        for session in self._sessions:
            session.drain()


class LlmAdminServicer(llm_pb2_grpc.LlmAdminServiceServicer):
    """omniserve.llm.v1.LlmAdminService."""

    def __init__(self, generator: Generator, llm: LlmServicer, settings: LlmSettings) -> None:
        self._generator = generator
        self._llm = llm
        self._settings = settings

    @override
    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> pb.LoadModelResponse:
        """See the contract."""
        check_name(request.model, self._generator.entry)
        await self._generator.engine.ready(wait_s=self._settings.load_wait_s, on_loading=lambda _: None)
        return pb.LoadModelResponse(model=self._llm.model())

    @override
    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Context) -> NoReturn:
        """Refuse: the one model of this server stays."""
        raise DomainError(Reason.UNSUPPORTED, "unloading is not supported by this server yet", field="model")

    @override
    async def SwapModel(self, request: pb.SwapModelRequest, context: Context) -> NoReturn:
        """Refuse: the one model of this server stays."""
        raise DomainError(Reason.UNSUPPORTED, "swapping is not supported by this server yet", field="path")


def _work(model: str, content: Chat | Completion, options: pb.Options, context: Context) -> Work:
    caller = caller_of(context)
    return Work(model, content, translate.options(options), caller.client, caller.tier, caller.request_id)
