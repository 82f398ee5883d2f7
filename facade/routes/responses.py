"""POST /v1/responses, and what is kept of it: GET and DELETE /v1/responses/{id}, its input items."""

import uuid

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.answering import Answering
from facade.body import read_request
from facade.describe import answers, json_body, path_parameter
from facade.door import principal_of
from facade.translate.answers import Head
from facade.translate.messages import unsupported
from facade.translate.query import read_input_items_query, read_retrieve_query
from facade.translate.response_answers import Building, ResponseStream, WholeResponse, beginning, item_list, replayed
from facade.translate.response_items import with_ids
from facade.translate.response_request import RESPONSE, call_of, read_response
from facade.wiring import Facade

_ID = path_parameter("response_id", "The response's id.")


def router(facade: Facade) -> APIRouter:
    """Return the routes of OpenAI's Responses API."""
    routes = APIRouter(tags=["Responses"])
    answering = Answering(facade)

    @routes.post(
        "/v1/responses",
        summary="Answer, and keep the answer so that the conversation can go on",
        openapi_extra=json_body(RESPONSE.schema()),
        responses=answers("response, or with stream its events", streams=True),
        response_class=Response,
    )
    async def create(request: Request) -> Response:
        asked, call = await read_request(request, read_response, limit_mib=facade.settings.body_limit_mib)
        principal = principal_of(request.scope)
        if asked.previous:
            call = call_of(asked, await facade.responses.conversation(asked.previous, principal))
        token = uuid.uuid4().hex  # not the request's id, which callers may choose twice
        named = await answering.head(call, principal, "")
        head = Head(f"resp_{token}", named.created, named.model)
        building = Building(beginning(asked, head), token, facade.clock.wall)

        async def keep() -> None:
            if asked.store:
                await facade.responses.save(building.response, with_ids(asked.items, token), principal)

        if call.stream:
            return answering.streamed(call, principal, ResponseStream(building), before_end=keep)
        await answering.collect(request, call, WholeResponse(building))
        await keep()
        return _json(building.response)

    _add_kept(routes, facade)
    return routes


def _add_kept(routes: APIRouter, facade: Facade) -> None:
    """Add the routes of what is kept."""

    @routes.get(
        "/v1/responses/{response_id}",
        summary="Return a kept response, or with stream=true the events of its making",
        openapi_extra=_ID,
        responses=answers("response", streams=True),
        response_class=Response,
    )
    async def retrieve(request: Request) -> Response:
        query = read_retrieve_query(request.query_params.multi_items())
        response = await facade.responses.get(request.path_params["response_id"], principal_of(request.scope))
        if not query.stream:
            return _json(response)
        events = replayed(response, after=query.starting_after)
        return Response(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    @routes.delete(
        "/v1/responses/{response_id}",
        summary="Remove a kept response",
        openapi_extra=_ID,
        responses=answers("id and deleted"),
        response_class=Response,
    )
    async def delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await facade.responses.delete(response_id, principal_of(request.scope))
        return _json({"id": response_id, "object": "response", "deleted": True})

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        summary="List what a kept response was asked, newest first",
        openapi_extra=_ID,
        responses=answers("list"),
        response_class=Response,
    )
    async def input_items(request: Request) -> Response:
        query = read_input_items_query(request.query_params.multi_items())
        items, has_more = await facade.responses.items(
            request.path_params["response_id"],
            principal_of(request.scope),
            ascending=query.ascending,
            after=query.after,
            size=query.limit,
        )
        return _json(item_list(items, has_more=has_more))

    @routes.post("/v1/responses/{response_id}/cancel", include_in_schema=False, response_class=Response)
    async def cancel() -> Response:
        unsupported(
            "background", "is not supported, so no response runs that could be cancelled; close its stream instead"
        )


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
