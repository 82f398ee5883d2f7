"""POST /v1/chat/completions and /v1/completions."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import Principal, principal_of
from facade.generation import Generation, watching
from facade.sse import Pace, StreamedAnswer
from facade.translate.answers import Head
from facade.translate.chat import CHAT, Call, read_chat
from facade.translate.completion import COMPLETION, read_completion
from facade.translate.stream import ChatStream, CompletionStream, Stream
from facade.translate.whole import Whole, WholeChat, WholeCompletion
from facade.wiring import Facade
from omniserve.llm.v1 import llm_pb2


def router(facade: Facade) -> APIRouter:
    """Return the routes that generate text."""
    routes = APIRouter(tags=["Text"])
    settings = facade.settings
    pace = Pace(settings.headers_after_s, settings.comment_every_s)

    def streamed(call: Call, principal: Principal, stream: Stream) -> Response:
        generation = _generation(facade, call, principal)
        return StreamedAnswer(generation, stream, pace=pace, owner=facade.owner, request_id=principal.request_id)

    @routes.post(
        "/v1/chat/completions",
        summary="Continue a conversation",
        openapi_extra=json_body(CHAT.schema()),
        responses=answers("chat.completion, or with stream its chunks", streams=True),
        response_class=Response,
    )
    async def chat(request: Request) -> Response:
        call = await read_request(request, read_chat, limit_mib=settings.body_limit_mib)
        principal = principal_of(request.scope)
        head = await _head(facade, call, principal, "chatcmpl-")
        if call.stream:
            return streamed(call, principal, ChatStream(head, include_usage=call.include_usage))
        return await _whole(facade, request, call, WholeChat(head))

    @routes.post(
        "/v1/completions",
        summary="Continue texts without a chat template",
        openapi_extra=json_body(COMPLETION.schema()),
        responses=answers("text_completion, or with stream its chunks", streams=True),
        response_class=Response,
    )
    async def completions(request: Request) -> Response:
        call = await read_request(request, read_completion, limit_mib=settings.body_limit_mib)
        principal = principal_of(request.scope)
        head = await _head(facade, call, principal, "cmpl-")
        if call.stream:
            return streamed(call, principal, CompletionStream(head, include_usage=call.include_usage))
        return await _whole(facade, request, call, WholeCompletion(head))

    return routes


async def _head(facade: Facade, call: Call, principal: Principal, prefix: str) -> Head:
    model = await facade.llm.name_of(call.model, principal)
    return Head(prefix + principal.request_id, int(facade.clock.wall()), model, call.choices)


def _generation(facade: Facade, call: Call, principal: Principal) -> Generation:
    messages = [_start(each, principal) for each in call.requests]
    return Generation(facade.session, messages, at_once=facade.settings.prompts_at_once)


async def _whole(facade: Facade, request: Request, call: Call, whole: Whole) -> Response:
    waiting = _generation(facade, call, principal_of(request.scope))
    with waiting as generation, watching(facade.owner, request.receive, generation):
        while not generation.finished:
            for prompt, event in await generation.take():
                if event.HasField("output"):
                    whole.output(prompt, event.output)
                elif event.HasField("done"):
                    whole.done(prompt, event.done)
    return Response(orjson.dumps(whole.result()), media_type="application/json")


def _start(
    request: llm_pb2.ChatRequest | llm_pb2.CompleteRequest, principal: Principal
) -> llm_pb2.GenerateSessionRequest:
    message = llm_pb2.GenerateSessionRequest()
    start = message.start
    if isinstance(request, llm_pb2.ChatRequest):
        start.chat.CopyFrom(request)
    else:
        start.complete.CopyFrom(request)
    start.client, start.tier = principal.client, principal.tier
    start.request_id, start.traceparent = principal.request_id, principal.traceparent
    return message
