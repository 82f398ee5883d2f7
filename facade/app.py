"""The ASGI application: every route, and the door before them."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from facade.door import Door, principal_of
from facade.errors import error_response, note_if_caller_left
from facade.routes import (
    absent,
    docs,
    embeddings,
    generate,
    generations,
    health,
    holds,
    image_files,
    images,
    memory,
    messages,
    models,
    orders,
    picture_orders,
    responses,
    tokens,
)
from facade.wiring import Facade
from services.kit.errors import DomainError, Reason
from services.kit.tokens import TokenBook

_DESCRIPTION = "An OpenAI-compatible API over the engines of one box."


def build_app(facade: Facade, book: TokenBook | None) -> FastAPI:
    """Return the application. `book` None believes every caller."""
    app = FastAPI(
        title="OmniServe Mesh",
        version="1",
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the Host that the caller claims
    )
    app.add_middleware(Door, book=book)
    app.add_exception_handler(DomainError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    routers = (
        generations.router,
        generate.router,
        embeddings.router,
        images.router,
        image_files.router,
        responses.router,
        messages.router,
        models.router,
        tokens.router,
        health.router,
        orders.router,
        picture_orders.router,
        holds.router,
        memory.router,
    )
    for router in routers:
        app.include_router(router(facade))
    app.include_router(docs.router(app))
    app.include_router(absent.router())
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, DomainError)  # noqa: S101 - registered for nothing else
    note_if_caller_left(error)
    principal = principal_of(request.scope)
    return error_response(error, principal.request_id, request.scope["path"], may_leave=principal.may_leave)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    request_id = principal_of(request.scope).request_id
    path = request.scope["path"][:200]
    if error.status_code == 405:
        message = f"{path} does not take {request.method}."
        refused = DomainError(Reason.INVALID_REQUEST, message, metadata={"code": "method_not_allowed"})
        return error_response(refused, request_id, path, status=405, headers=error.headers)
    refused = DomainError(Reason.NOT_FOUND, f"There is no {path} here; /docs lists what there is.")
    return error_response(refused, request_id, path)
