"""POST /admin/hold and /admin/release: the operator's, for co-tenants that want the device to themselves for a while."""

from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import operator_of
from facade.translate.holds import HOLD, RELEASE, hold_answer, read_hold, read_release
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes about holds."""
    routes = APIRouter(tags=["Operator"])
    limit_mib = facade.settings.body_limit_mib

    @routes.post(
        "/admin/hold",
        summary="Grant nothing for a while, once what is in flight has ended; ?seconds=N will do",
        openapi_extra=json_body(HOLD.schema()),
        responses=answers("hold_id, drained, in_flight"),
        response_class=Response,
    )
    async def hold(request: Request) -> Response:
        who = operator_of(request.scope)
        read = partial(read_hold, request.query_params.multi_items())
        asked = await read_request(request, read, limit_mib=limit_mib, may_be_empty=True)
        return _json(hold_answer(await facade.holds.hold(asked, who)))

    @routes.post(
        "/admin/release",
        summary="End a hold, or all of them",
        openapi_extra=json_body(RELEASE.schema()),
        responses=answers("released"),
        response_class=Response,
    )
    async def release(request: Request) -> Response:
        who = operator_of(request.scope)
        read = partial(read_release, request.query_params.multi_items())
        asked = await read_request(request, read, limit_mib=limit_mib, may_be_empty=True)
        return _json({"released": (await facade.holds.release(asked, who)).released})

    return routes


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")
