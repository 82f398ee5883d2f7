"""GET /v1/models and /v1/models/{id}."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.describe import answers, path_parameter
from facade.door import principal_of
from facade.translate.failures import model_not_found
from facade.translate.models import find_model, model_list, model_object
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes that tell which models there are."""
    routes = APIRouter(tags=["Models"])

    @routes.get("/v1/models", summary="List the models", responses=answers("list"), response_class=Response)
    async def list_models(request: Request) -> Response:
        listed = await facade.llm.models(principal_of(request.scope))
        return Response(orjson.dumps(model_list(listed)), media_type="application/json")

    @routes.get(
        "/v1/models/{model:path}",  # names may have slashes
        summary="Describe one model",
        openapi_extra=path_parameter("model", "Catalogue name or alias."),
        responses=answers("model"),
        response_class=Response,
    )
    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        listed = await facade.llm.models(principal_of(request.scope))
        model = find_model(listed.models, name) if name else None
        if model is None:
            raise model_not_found(name)
        return Response(orjson.dumps(model_object(model)), media_type="application/json")

    return routes
