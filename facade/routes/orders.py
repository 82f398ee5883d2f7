"""POST /admin/llm/load, /admin/llm/unload and /admin/llm/swap: the operator's."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import operator_of
from facade.translate.models import model_object
from facade.translate.orders import LOAD, SWAP, UNLOAD, read_load, read_swap, read_unload
from facade.wiring import Facade
from omniserve.llm.v1 import llm_pb2


def router(facade: Facade) -> APIRouter:
    """Return the routes that change what is in memory."""
    routes = APIRouter(tags=["Operator"])
    limit_mib = facade.settings.body_limit_mib

    @routes.post(
        "/admin/llm/load",
        summary="Load a model of the catalogue",
        openapi_extra=json_body(LOAD.schema()),
        responses=answers("model"),
        response_class=Response,
    )
    async def load(request: Request) -> Response:
        operator = operator_of(request.scope)
        order = await read_request(request, read_load, limit_mib=limit_mib, may_be_empty=True)
        return _told(await facade.llm.load(order, operator))

    @routes.post(
        "/admin/llm/unload",
        summary="Free a model's memory when its running answers have ended",
        openapi_extra=json_body(UNLOAD.schema()),
        responses=answers("model"),
        response_class=Response,
    )
    async def unload(request: Request) -> Response:
        operator = operator_of(request.scope)
        order = await read_request(request, read_unload, limit_mib=limit_mib, may_be_empty=True)
        return _told(await facade.llm.unload(order, operator))

    @routes.post(
        "/admin/llm/swap",
        summary="Serve another file in place of the default model; the former one serves again if that fails",
        openapi_extra=json_body(SWAP.schema()),
        responses=answers("model"),
        response_class=Response,
    )
    async def swap(request: Request) -> Response:
        operator = operator_of(request.scope)
        order = await read_request(request, read_swap, limit_mib=limit_mib)
        return _told(await facade.llm.swap(order, operator))

    return routes


def _told(model: llm_pb2.Model) -> Response:
    return Response(orjson.dumps(model_object(model)), media_type="application/json")
