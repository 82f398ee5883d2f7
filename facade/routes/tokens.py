"""POST /tokenize and /detokenize."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import principal_of
from facade.translate.tokens import DETOKENIZE, TOKENIZE, detokenized, read_detokenize, read_tokenize, tokenized
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes between text and tokens."""
    routes = APIRouter(tags=["Tokens"])
    limit_mib = facade.settings.body_limit_mib

    @routes.post(
        "/tokenize",
        summary="Split a text or a chat into tokens",
        openapi_extra=json_body(TOKENIZE.schema()),
        responses=answers("tokens"),
        response_class=Response,
    )
    async def tokenize(request: Request) -> Response:
        message, with_pieces = await read_request(request, read_tokenize, limit_mib=limit_mib)
        response = await facade.llm.tokenize(message, principal_of(request.scope))
        return Response(orjson.dumps(tokenized(response, with_pieces=with_pieces)), media_type="application/json")

    @routes.post(
        "/detokenize",
        summary="Turn tokens into text",
        openapi_extra=json_body(DETOKENIZE.schema()),
        responses=answers("text"),
        response_class=Response,
    )
    async def detokenize(request: Request) -> Response:
        message = await read_request(request, read_detokenize, limit_mib=limit_mib)
        response = await facade.llm.detokenize(message, principal_of(request.scope))
        return Response(orjson.dumps(detokenized(response)), media_type="application/json")

    return routes
