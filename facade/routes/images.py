"""POST /v1/images/*: pictures from texts and pictures."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from facade.body import read_form_or_json, read_request
from facade.describe import answers, json_body, json_or_form
from facade.door import Principal, principal_of
from facade.generation import watching
from facade.sse import Pace, StreamedAnswer
from facade.translate.fields import refuse
from facade.translate.image_answers import PictureStream, WholePictures
from facade.translate.image_requests import (
    EDIT,
    GENERATION,
    UPSCALE,
    VARIATION,
    PictureCall,
    form_schema,
    read_background,
    read_background_style,
    read_edit,
    read_generation,
    read_upscale,
    read_variation,
)
from facade.translate.record import Record
from facade.wiring import Facade

_BACKGROUND: Final = "background"


def router(facade: Facade) -> APIRouter:
    """Return the routes that make pictures."""
    routes = APIRouter(tags=["Images"])
    limit_mib = facade.settings.body_limit_mib
    drawing = _Drawing(facade)

    def from_text(path: str, summary: str, read: Callable[[Mapping[str, Any]], PictureCall], tier: str | None) -> None:
        @routes.post(
            path,
            name=path.rpartition("/")[2],
            summary=summary,
            openapi_extra=json_body(GENERATION.schema()),
            responses=answers("created and data, or with stream its events", streams=True),
            response_class=Response,
        )
        async def generate(request: Request) -> Response:
            return await drawing.answer(request, await read_request(request, read, limit_mib=limit_mib), tier)

    def from_pictures(
        path: str,
        summary: str,
        table: Record,
        read: Callable[[Mapping[str, Any]], PictureCall],
        *,
        tier: str | None = None,
    ) -> None:
        @routes.post(
            path,
            name=path.rpartition("/")[2],
            summary=summary,
            openapi_extra=json_or_form(table.schema(), form_schema(table)),
            responses=answers("created and data, or with stream its events", streams="stream" in table.fields),
            response_class=Response,
        )
        async def change(request: Request) -> Response:
            call = await read_form_or_json(request, table, read, limit_mib=limit_mib)
            return await drawing.answer(request, call, tier)

    from_text("/v1/images/generations", "Make pictures from a text", read_generation, None)
    from_pictures("/v1/images/edits", "Change pictures by a text, everywhere or under a mask", EDIT, read_edit)
    from_pictures("/v1/images/variations", "Make pictures that resemble one", VARIATION, read_variation)
    from_pictures("/v1/images/upscale", "Enlarge a picture", UPSCALE, read_upscale)
    from_text(
        "/v1/images/backgrounds",
        "Make backdrops when nobody else waits, replayed exactly",
        read_background,
        _BACKGROUND,
    )
    from_pictures(
        "/v1/images/backgrounds/style",
        "Restyle a backdrop when nobody else waits, replayed exactly",
        EDIT,
        read_background_style,
        tier=_BACKGROUND,
    )
    return routes


class _Drawing:
    """Answers translated calls."""

    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._pace = Pace(facade.settings.headers_after_s, facade.settings.comment_every_s)

    async def answer(self, request: Request, call: PictureCall, tier: str | None) -> Response:
        """Return the answer to a call, at a tier instead of the caller's own if one is given. Raises DomainError."""
        principal = principal_of(request.scope)
        _check_paths(call, principal)
        principal = principal if tier is None else replace(principal, tier=tier)
        if principal.may_leave:
            call.take_at_once()
        if not call.stream:
            call.leave_out_steps()
        created = int(self._facade.clock.wall())
        pictures = self._facade.images.pictures(call, principal)
        if call.stream:
            return StreamedAnswer(
                pictures,
                PictureStream(call.event, call.pictures, created, holds=principal.may_leave),
                pace=replace(self._pace, headers_after_s=None) if principal.may_leave else self._pace,
                owner=self._facade.owner,
                request_id=principal.request_id,
            )
        if call.as_urls:
            await self._facade.kept_pictures.ready()  # nothing is drawn that could not be told
        whole = WholePictures(call.pictures, created)
        with pictures, watching(self._facade.owner, request.receive, pictures):
            while not pictures.finished:
                for event in await pictures.take():
                    whole.take(event)
        kept = self._facade.kept_pictures
        urls = [await kept.save(each.image, principal) for each in whole.images()] if call.as_urls else []
        return Response(orjson.dumps(whole.result(urls)), media_type="application/json")


def _check_paths(call: PictureCall, principal: Principal) -> None:
    """Refuse files of the host that somebody else than the operator names."""
    if call.paths and not principal.is_operator:
        refuse(call.paths[0], "is only allowed on the operator's listener; use 'lora_id'")
