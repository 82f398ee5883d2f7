"""POST /v1/embeddings, /api/v1/feature-extraction and /v1/rerank."""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import principal_of
from facade.translate.embeddings import EMBEDDINGS, embedding_list, read_embeddings
from facade.translate.failures import naming
from facade.translate.features import FEATURES, features, read_features, rest_field
from facade.translate.rerank import RERANK, ranking, read_rerank
from facade.waiting import while_connected
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes that make or compare vectors."""
    routes = APIRouter(tags=["Embeddings"])
    limit_mib = facade.settings.body_limit_mib

    @routes.post(
        "/v1/embeddings",
        summary="Turn texts into vectors",
        openapi_extra=json_body(EMBEDDINGS.schema()),
        responses=answers("list of embedding"),
        response_class=Response,
    )
    async def embeddings(request: Request) -> Response:
        call = await read_request(request, read_embeddings, limit_mib=limit_mib)
        with naming(call.rest_field), while_connected(facade.owner, request.receive):
            response = await facade.llm.embed(call.request, principal_of(request.scope))
        return _json(embedding_list(response, as_base64=call.base64))

    @routes.post(
        "/api/v1/feature-extraction",
        summary="Turn one text into a flat vector",
        openapi_extra=json_body(FEATURES.schema()),
        responses=answers("array of numbers"),
        response_class=Response,
    )
    async def extract(request: Request) -> Response:
        message = await read_request(request, read_features, limit_mib=limit_mib)
        with naming(rest_field), while_connected(facade.owner, request.receive):
            response = await facade.llm.embed(message, principal_of(request.scope))
        return _json(features(message, response))

    @routes.post(
        "/v1/rerank",
        summary="Order documents by how well they answer a query",
        openapi_extra=json_body(RERANK.schema()),
        responses=answers("list of results, best first"),
        response_class=Response,
    )
    async def rerank(request: Request) -> Response:
        call = await read_request(request, read_rerank, limit_mib=limit_mib)
        principal = principal_of(request.scope)
        with while_connected(facade.owner, request.receive):
            response = await facade.llm.rerank(call.request, principal)
        return _json(ranking(call, response, f"rerank-{principal.request_id}"))

    return routes


def _json(value: Any) -> Response:  # noqa: ANN401 - JSON, with numpy arrays
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
