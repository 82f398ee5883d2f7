"""GET /v1/models and /v1/models/{id}."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.describe import answers, path_parameter
from facade.door import principal_of
from facade.translate.failures import model_not_found
from facade.translate.models import find_model, find_picture_model, model_list, model_object, picture_model_object
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes that tell which models there are."""
    routes = APIRouter(tags=["Models"])

    @routes.get("/v1/models", summary="List the models", responses=answers("list"), response_class=Response)
    async def list_models(request: Request) -> Response:
        principal = principal_of(request.scope)
        listed = await facade.llm.models(principal)
        pictures = await facade.images.catalogue(principal)
        return Response(orjson.dumps(model_list(listed, pictures)), media_type="application/json")

    @routes.get(
        "/v1/models/{model:path}",  # names may have slashes
        summary="Describe one model",
        openapi_extra=path_parameter("model", "Catalogue name or alias."),
        responses=answers("model"),
        response_class=Response,
    )
    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        principal = principal_of(request.scope)
        listed = await facade.llm.models(principal)
        model = find_model(listed.models, name) if name else None
        if model is not None:
            return Response(orjson.dumps(model_object(model)), media_type="application/json")
        picture_model = find_picture_model(await facade.images.catalogue(principal), name)
        if picture_model is None:
            raise model_not_found(name)
        return Response(orjson.dumps(picture_model_object(picture_model)), media_type="application/json")

    return routes
