"""POST /v1/chat/completions, /v1/completions and the older /v1/engines/{engine}/completions."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.answering import Answering
from facade.body import read_request
from facade.describe import answers, json_body, path_parameter
from facade.door import principal_of
from facade.translate.chat import CHAT, Call, read_chat
from facade.translate.completion import COMPLETION, read_completion, read_engine_completion
from facade.translate.stream import ChatStream, CompletionStream
from facade.translate.whole import Whole, WholeChat, WholeCompletion
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes that generate text."""
    routes = APIRouter(tags=["Text"])
    limit_mib = facade.settings.body_limit_mib
    answering = Answering(facade)

    async def whole(request: Request, call: Call, collector: Whole) -> Response:
        await answering.collect(request, call, collector)
        return Response(orjson.dumps(collector.result()), media_type="application/json")

    async def completed(request: Request, call: Call) -> Response:
        principal = principal_of(request.scope)
        head = await answering.head(call, principal, "cmpl-")
        if call.stream:
            return answering.streamed(call, principal, CompletionStream(head, include_usage=call.include_usage))
        return await whole(request, call, WholeCompletion(head))

    @routes.post(
        "/v1/chat/completions",
        summary="Continue a conversation",
        openapi_extra=json_body(CHAT.schema()),
        responses=answers("chat.completion, or with stream its chunks", streams=True),
        response_class=Response,
    )
    async def chat(request: Request) -> Response:
        call = await read_request(request, read_chat, limit_mib=limit_mib)
        principal = principal_of(request.scope)
        head = await answering.head(call, principal, "chatcmpl-")
        if call.stream:
            return answering.streamed(call, principal, ChatStream(head, include_usage=call.include_usage))
        return await whole(request, call, WholeChat(head))

    @routes.post(
        "/v1/completions",
        summary="Continue texts without a chat template",
        openapi_extra=json_body(COMPLETION.schema()),
        responses=answers("text_completion, or with stream its chunks", streams=True),
        response_class=Response,
    )
    async def completions(request: Request) -> Response:
        return await completed(request, await read_request(request, read_completion, limit_mib=limit_mib))

    @routes.post(
        "/v1/engines/{engine}/completions",
        summary="Continue texts with the model that the path names",
        openapi_extra=path_parameter("engine", "Catalogue name or alias.") | json_body(COMPLETION.schema()),
        responses=answers("text_completion, or with stream its chunks", streams=True),
        response_class=Response,
    )
    async def engine_completions(request: Request) -> Response:
        engine = request.path_params["engine"]
        call = await read_request(request, lambda body: read_engine_completion(body, engine), limit_mib=limit_mib)
        return await completed(request, call)

    return routes
