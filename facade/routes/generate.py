"""POST /api/v1/generate, /api/v1/generate-large, /api/v1/autocomplete and /api/v1/summarization."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.answering import Answering
from facade.body import read_request
from facade.describe import answers, json_body
from facade.door import principal_of
from facade.translate.generate import AUTOCOMPLETE, GENERATE, SUMMARIZATION, Kind, Results, with_model
from facade.translate.models import choose_model
from facade.wiring import Facade


def router(facade: Facade) -> APIRouter:
    """Return the routes of the text-generator API."""
    routes = APIRouter(tags=["Text"])
    limit_mib = facade.settings.body_limit_mib
    answering = Answering(facade)

    async def results(request: Request, kind: Kind, *, largest: bool = False) -> Results:
        call = await read_request(request, kind.read, limit_mib=limit_mib)
        principal = principal_of(request.scope)
        models = await facade.llm.catalogue(principal)
        call = with_model(call, choose_model(models, call.model, largest=largest))
        found = Results(await answering.head(call, principal, ""))
        await answering.collect(request, call, found)
        return found

    def add(path: str, summary: str, kind: Kind, *, largest: bool = False) -> None:
        @routes.post(
            path,
            name=path.rpartition("/")[2],
            summary=summary,
            openapi_extra=json_body(kind.fields.schema()),
            responses=answers("array of {generated_text, stop_reason, model, usage}"),
            response_class=Response,
        )
        async def generate(request: Request) -> Response:
            found = await results(request, kind, largest=largest)
            return Response(orjson.dumps(found.result()), media_type="application/json")

    add("/api/v1/generate", "Continue a text", GENERATE)
    add("/api/v1/generate-large", "Continue a text with the largest model of the catalogue", GENERATE, largest=True)
    add("/api/v1/autocomplete", "Continue a text by a few words", AUTOCOMPLETE)

    @routes.post(
        "/api/v1/summarization",
        summary="Summarize a text",
        openapi_extra=json_body(SUMMARIZATION.fields.schema()),
        responses=answers("generated_text"),
        response_class=Response,
    )
    async def summarization(request: Request) -> Response:
        found = await results(request, SUMMARIZATION)
        return Response(orjson.dumps(found.summary()), media_type="application/json")

    return routes
