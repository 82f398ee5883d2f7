"""POST /v1/messages and /v1/messages/count_tokens."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.answering import Answering
from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import principal_of
from facade.translate.anthropic import COUNT_TOKENS, MESSAGES, read_count_tokens, read_messages
from facade.translate.anthropic_answers import MessageStream, WholeMessage
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes of Anthropic's API."""
    routes = APIRouter(tags=["Text"])
    limit_mib = facade.settings.body_limit_mib
    answering = Answering(facade)

    @routes.post(
        "/v1/messages",
        summary="Continue a conversation in Anthropic's shape",
        openapi_extra=json_body(MESSAGES.schema()),
        responses=answers("message, or with stream its events", streams=True),
        response_class=Response,
    )
    async def messages(request: Request) -> Response:
        call = await read_request(request, read_messages, limit_mib=limit_mib)
        principal = principal_of(request.scope)
        head = await answering.head(call, principal, "msg_")
        if call.stream:
            return answering.streamed(call, principal, MessageStream(head))
        message = WholeMessage(head)
        await answering.collect(request, call, message)
        return Response(orjson.dumps(message.result()), media_type="application/json")

    @routes.post(
        "/v1/messages/count_tokens",
        summary="Count the tokens of a conversation in Anthropic's shape",
        openapi_extra=json_body(COUNT_TOKENS.schema()),
        responses=answers("input_tokens"),
        response_class=Response,
    )
    async def count_tokens(request: Request) -> Response:
        message, names = await read_request(request, read_count_tokens, limit_mib=limit_mib)
        counted = await facade.llm.tokenize(message, principal_of(request.scope), names)
        return Response(orjson.dumps({"input_tokens": len(counted.tokens)}), media_type="application/json")

    return routes
