"""GET /health, /readyz and /status."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.describe import answers
from facade.door import principal_of
from facade.errors import error_object
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

    def _not_ready(found: Mapping[str, str]) -> DomainError | None:
        if facade.draining.is_set():
            return DomainError(Reason.DRAINING, "The facade is shutting down.")
        missing = [f"{name} is {found[name]}" for name in facade.settings.required_services if found[name] != "serving"]
        return DomainError(Reason.LOADING, f"Not ready: {', '.join(missing)}.") if missing else None

    @routes.get(
        "/status",
        summary="Show what every service tells about itself",
        responses=answers("status and services; numbers of 64 bits are strings"),
        response_class=Response,
    )
    async def status() -> Response:
        services = await facade.peers.status()
        fresh = all(not each["stale"] for each in services.values())
        verdict = _verdict(await facade.peers.health()) if fresh else "degraded"
        return _json({"status": verdict, "services": services})

    return routes


def _verdict(found: Mapping[str, str]) -> str:
    return "ok" if all(each == "serving" for each in found.values()) else "degraded"


def _details(found: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"status": each} for name, each in found.items()}


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
