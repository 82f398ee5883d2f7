"""GET /health, /readyz, /status and /metrics."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.describe import answers
from facade.door import operator_of, principal_of
from facade.errors import error_object
from facade.peers import Health
from facade.translate.metrics import CONTENT_TYPE, exposition
from facade.translate.state import summary
from facade.wiring import Facade
from services.kit.errors import DomainError, Reason


def router(facade: Facade) -> APIRouter:
    """Return the routes that tell how the mesh is."""
    routes = APIRouter(tags=["State"])

    @routes.get(
        "/health",
        summary="Tell that the facade lives, and how the services are",
        responses=answers("status ok or degraded"),
        response_class=Response,
    )
    async def health() -> Response:
        found = await facade.peers.health()
        return _json({"status": _verdict(found), "services": _details(found)})

    @routes.get(
        "/readyz",
        summary="Tell whether requests can be served now: 200 or 503",
        responses=answers("status ready"),
        response_class=Response,
    )
    async def readyz(request: Request) -> Response:
        found = await facade.peers.health()
        error = _not_ready(found)
        if error is None:
            return _json({"status": "ready", "services": _details(found)})
        told = error_object(error, principal_of(request.scope).request_id)
        return _json({"status": "not_ready", "services": _details(found), **told}, status=503)

    def _not_ready(found: Mapping[str, Health]) -> DomainError | None:
        if facade.draining.is_set():
            return DomainError(Reason.DRAINING, "The facade is shutting down.")
        required = {name: found[name] for name in facade.settings.required_services}
        missing = [f"{name} is {_words(each)}" for name, each in required.items() if each.status != "serving"]
        return DomainError(Reason.LOADING, f"Not ready: {', '.join(missing)}.") if missing else None

    @routes.get(
        "/status",
        summary="Show what every service tells about itself",
        responses=answers("status, services, and gpu, tune and speculation of the default model"),
        response_class=Response,
    )
    async def status() -> Response:
        services = await facade.peers.status()
        fresh = all(not each["stale"] for each in services.values())
        verdict = _verdict(await facade.peers.health()) if fresh else "degraded"
        return _json({"status": verdict, "services": services, **summary(services)})

    @routes.get(
        "/metrics",
        summary="Show the figures of all services in Prometheus's text format",
        responses={200: {"description": "Prometheus's text format", "content": {"text/plain": {}}}},
        response_class=Response,
    )
    async def metrics(request: Request) -> Response:
        operator_of(request.scope)
        return Response(exposition(await facade.peers.status()), headers={"content-type": CONTENT_TYPE})

    return routes


def _verdict(found: Mapping[str, Health]) -> str:
    return "ok" if all(each.status == "serving" for each in found.values()) else "degraded"


def _details(found: Mapping[str, Health]) -> dict[str, dict[str, str]]:
    return {
        name: {"status": each.status} | ({"detail": each.detail} if each.detail else {}) for name, each in found.items()
    }


def _words(health: Health) -> str:
    return f"{health.status} ({health.detail})" if health.detail else health.status


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
