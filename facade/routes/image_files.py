"""GET /v1/images/files/{image_id}: pictures that were asked for as URLs."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from facade.describe import file_answers, parameters
from facade.door import Principal, principal_of
from facade.kept_pictures import KeptPictures
from facade.translate.image_files import FILE_QUERY, file_headers, read_file_query
from facade.wiring import Facade
from omniserve.jobs.v1 import jobs_pb2 as pb

_MEDIA_TYPES: Final = ("image/webp", "image/png", "image/jpeg")


def router(facade: Facade) -> APIRouter:
    """Return the route that sends kept pictures."""
    routes = APIRouter(tags=["Images"])

    @routes.get(
        "/v1/images/files/{image_id}",
        name="image_file",
        summary="Fetch a picture by the URL that a request for pictures answered; it needs no key",
        openapi_extra=parameters("image_id", "The picture's id.", FILE_QUERY.schema()),
        responses=file_answers(_MEDIA_TYPES),
        response_class=Response,
    )
    async def image_file(request: Request) -> Response:
        asked = read_file_query(request.path_params["image_id"], request.query_params.multi_items())
        return _Sent(facade.kept_pictures, asked, principal_of(request.scope))

    return routes


class _Sent(Response):
    """Sends a picture as it arrives. Raises DomainError before anything is sent; afterwards the connection is cut."""

    def __init__(self, kept: KeptPictures, asked: pb.ReadSignedImageRequest, who: Principal) -> None:
        super().__init__()  # only the name: we send everything ourselves
        self._kept = kept
        self._asked = asked
        self._who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - of every response
        """Send it."""
        async with self._kept.opened(self._asked, self._who) as (head, pieces):
            await send({"type": "http.response.start", "status": 200, "headers": file_headers(head)})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
