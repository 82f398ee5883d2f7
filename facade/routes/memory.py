"""GET /v1/gpu/vram and /v1/host/memory, POST /v1/gpu/lease, /v1/gpu/renew and /v1/gpu/release: the operator's only."""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import operator_of
from facade.translate.memory import (
    LEASE,
    RELEASE,
    RENEW,
    lease_answer,
    read_lease,
    read_release,
    read_renew,
    state,
    without_items,
    worded,
)
from facade.wiring import Facade
from services.kit.errors import DomainError


def router(facade: Facade) -> APIRouter:
    """Return the routes about memory."""
    routes = APIRouter(tags=["Memory"])
    limit_mib = facade.settings.body_limit_mib

    @routes.get(
        "/v1/gpu/vram",
        summary="Show who holds what, who was denied and why, and what is left",
        responses=answers("vram_available, devices, leases, denials, counters"),
        response_class=Response,
    )
    async def vram(request: Request) -> Response:
        return _json(state(await facade.vram.state(operator_of(request.scope))))

    @routes.post(
        "/v1/gpu/lease",
        summary="Ask for memory; a denial is a 200 with granted false",
        openapi_extra=json_body(LEASE.schema()),
        responses=answers("granted, lease_id, items, ttl_s, headroom_mib; or granted false, reason, message"),
        response_class=Response,
    )
    async def lease(request: Request) -> Response:
        who = operator_of(request.scope)
        asked, is_short = await read_request(request, read_lease, limit_mib=limit_mib)
        try:
            answer = await facade.vram.lease(asked, who, request.receive)
        except DomainError as error:
            if not is_short:
                raise
            raise without_items(error) from error
        return _json(lease_answer(answer))

    @routes.post(
        "/v1/gpu/renew",
        summary="Keep a lease alive and tell what of it is allocated",
        openapi_extra=json_body(RENEW.schema()),
        responses=answers("lease, headroom_mib"),
        response_class=Response,
    )
    async def renew(request: Request) -> Response:
        who = operator_of(request.scope)
        asked = await read_request(request, read_renew, limit_mib=limit_mib)
        return _json(worded(await facade.vram.renew(asked, who)))

    @routes.post(
        "/v1/gpu/release",
        summary="Give a lease back",
        openapi_extra=json_body(RELEASE.schema()),
        responses=answers("released"),
        response_class=Response,
    )
    async def release(request: Request) -> Response:
        who = operator_of(request.scope)
        asked = await read_request(request, read_release, limit_mib=limit_mib)
        return _json(worded(await facade.vram.release(asked, who)))

    @routes.get(
        "/v1/host/memory",
        summary="Show the host's RAM and what of the weights is kept warm in it",
        responses=answers("total_mib, available_mib, files"),
        response_class=Response,
    )
    async def host_memory(request: Request) -> Response:
        return _json(worded(await facade.vram.host_memory(operator_of(request.scope))))

    return routes


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
