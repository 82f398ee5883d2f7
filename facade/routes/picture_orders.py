"""POST /admin/diffusion/teleport/clear: the operator's."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import operator_of
from facade.translate.picture_orders import CLEAR, read_clear
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the route that empties the exact caches of pictures."""
    routes = APIRouter(tags=["Operator"])

    @routes.post(
        "/admin/diffusion/teleport/clear",
        name="clear_teleport",
        summary="Empty the exact caches of pictures",
        openapi_extra=json_body(CLEAR.schema()),
        responses=answers("entries and size_bytes"),
        response_class=Response,
    )
    async def clear(request: Request) -> Response:
        operator = operator_of(request.scope)
        order = await read_request(request, read_clear, limit_mib=facade.settings.body_limit_mib, may_be_empty=True)
        gone = await facade.images.clear_teleport(order, operator)
        told = {"entries": gone.entries, "size_bytes": gone.size_bytes}
        return Response(orjson.dumps(told), media_type="application/json")

    return routes
