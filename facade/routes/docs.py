"""GET /docs and /openapi.json."""

import functools

import orjson
from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from facade.describe import docs_page

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def router(app: FastAPI) -> APIRouter:
    """Return the routes that describe the others."""
    routes = APIRouter(include_in_schema=False)

    @functools.cache
    def page() -> str:
        return docs_page(app.openapi())

    @functools.cache
    def description() -> bytes:
        return orjson.dumps(app.openapi())

    @routes.get("/openapi.json", response_class=Response)
    async def openapi() -> Response:
        return Response(description(), media_type="application/json")

    @routes.get("/docs", response_class=Response)
    async def docs() -> Response:
        return Response(page(), media_type="text/html; charset=utf-8", headers=_HEADERS)

    return routes
