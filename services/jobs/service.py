"""The gRPC face of jobs: messages to values and back. Decides nothing."""
# ruff: noqa: N802 - servicers have the contract's names and arguments

import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc.aio

from omniserve.jobs.v1 import jobs_pb2 as pb
from omniserve.jobs.v1 import jobs_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.jobs.adapters import responses
from services.jobs.adapters.journal import Journal
from services.jobs.core.images import MEDIA_TYPES, check_size, span
from services.jobs.core.responses import Bounds, Item, Response, check_history, check_id, check_page, check_response
from services.jobs.pictures import Pictures, in_pieces
from services.kit.access import caller_of
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason

SERVICES: Final = ("omniserve.jobs.v1.JobsStoreService",)

_ID_BYTES: Final = 16
_PIECE_BYTES: Final = 1024 * 1024

Context = grpc.aio.ServicerContext[Any, Any]


class JobsStoreServicer(jobs_pb2_grpc.JobsStoreServiceServicer):
    """Keeps responses and pictures for the facade; each belongs to the client that the call is for."""

    def __init__(self, journal: Journal, clock: Clock, bounds: Bounds, pictures: Pictures) -> None:
        self._pictures = pictures
        self._journal = journal
        self._clock = clock
        self._bounds = bounds

    def _now_ms(self) -> int:
        return int(self._clock.wall() * 1000)

    async def SaveResponse(self, request: pb.SaveResponseRequest, context: Context) -> pb.SaveResponseResponse:
        """As the contract says."""
        now_ms, principal, bounds = self._now_ms(), caller_of(context).client, self._bounds
        response = check_response(_response(request.response), bounds, now_ms=now_ms)
        await self._journal.run(lambda db: responses.save(db, principal, response, bounds, now_ms=now_ms))
        return pb.SaveResponseResponse(expires_unix_ms=response.expires_ms)

    async def GetResponse(self, request: pb.GetResponseRequest, context: Context) -> pb.GetResponseResponse:
        """As the contract says."""
        now_ms, principal, history = self._now_ms(), caller_of(context).client, check_history(request.history)
        response_id = check_id("response_id", request.response_id)
        found = await self._journal.run(
            lambda db: responses.get(db, principal, response_id, history=history, now_ms=now_ms)
        )
        return pb.GetResponseResponse(
            response=_stored(found.response),
            history=[_stored(each) for each in found.history],
            history_cut=found.history_cut,
        )

    async def DeleteResponse(self, request: pb.DeleteResponseRequest, context: Context) -> pb.DeleteResponseResponse:
        """As the contract says."""
        now_ms, principal = self._now_ms(), caller_of(context).client
        response_id = check_id("response_id", request.response_id)
        deleted = await self._journal.run(lambda db: responses.delete(db, principal, response_id, now_ms=now_ms))
        return pb.DeleteResponseResponse(deleted=deleted)

    async def ListInputItems(self, request: pb.ListInputItemsRequest, context: Context) -> pb.ListInputItemsResponse:
        """As the contract says."""
        now_ms, principal, size = self._now_ms(), caller_of(context).client, check_page(request.page_size)
        response_id = check_id("response_id", request.response_id)
        items, more = await self._journal.run(
            lambda db: responses.list_items(
                db,
                principal,
                response_id,
                ascending=request.ascending,
                after=request.after if request.HasField("after") else None,
                size=size,
                now_ms=now_ms,
            )
        )
        return pb.ListInputItemsResponse(items_json=items, has_more=more)

    async def SaveImage(
        self, request_iterator: AsyncIterator[pb.SaveImageRequest], context: Context
    ) -> pb.SaveImageResponse:
        """As the contract says."""
        head, data = await self._received(request_iterator)
        signed = await self._pictures.save(
            data,
            _media_type(head),
            caller_of(context).client,
            secrets.token_urlsafe(_ID_BYTES),
            head.ttl_s if head.HasField("ttl_s") else None,
        )
        return pb.SaveImageResponse(url=signed.url, expires_unix_ms=signed.expires_ms, image_id=signed.image_id)

    async def _received(self, messages: AsyncIterator[pb.SaveImageRequest]) -> tuple[pb.ImageHead, bytes]:
        """Return what a caller sends. Raises DomainError."""
        head: pb.ImageHead | None = None
        data = bytearray()
        async for message in messages:
            if message.HasField("head") == (head is not None):
                raise _refusal("head", "must be the first message, and only that")
            if head is None:
                head = message.head
                _media_type(head)
                check_size(head.size_bytes, self._pictures.bounds)
            if len(message.data) > _PIECE_BYTES:
                raise _refusal("data", f"has {len(message.data)} bytes; at most {_PIECE_BYTES} go in one message")
            data += message.data
            check_size(len(data), self._pictures.bounds)
        if head is None or not data:
            raise _refusal("data", "is missing")
        if head.HasField("size_bytes") and head.size_bytes != len(data):
            raise _refusal("head.size_bytes", f"is {head.size_bytes}, but {len(data)} bytes followed")
        return head, bytes(data)

    async def ReadSignedImage(
        self, request: pb.ReadSignedImageRequest, context: Context
    ) -> AsyncIterator[pb.ReadSignedImageResponse]:
        """As the contract says."""
        client = caller_of(context).client
        opened = self._pictures.opened(request.image_id, request.expires_unix_ms, request.signature, client)
        async with opened as (image, reading):
            asked = request.bytes
            part = span(image.size_bytes, asked.first, asked.last if asked.HasField("last") else None)
            head = pb.MediaHead(
                mime_type=image.media_type,
                size_bytes=image.size_bytes,
                first=part.first if part else 0,
                length_bytes=part.length if part else 0,
                sha256=image.digest,
                modified_unix_s=reading.modified_s,
                range_unsatisfiable=part is None,
            )
            yield pb.ReadSignedImageResponse(head=head)
            if part is not None:
                async for piece in in_pieces(reading.pieces(part)):
                    yield pb.ReadSignedImageResponse(data=piece)


def _media_type(head: pb.ImageHead) -> str:
    name = media_pb2.ImageFormat.Name(head.format).removeprefix("IMAGE_FORMAT_").lower()
    if name not in MEDIA_TYPES:
        raise _refusal("head.format", f"must be one of {', '.join(MEDIA_TYPES)}")
    return MEDIA_TYPES[name]


def _refusal(path: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {sentence}", field=path)


def registration(servicer: JobsStoreServicer) -> Callable[[grpc.aio.Server], None]:
    """Return what adds the servicer to a server."""

    def register(server: grpc.aio.Server) -> None:
        jobs_pb2_grpc.add_JobsStoreServiceServicer_to_server(servicer, server)

    return register


def _response(message: pb.StoredResponse) -> Response:
    return Response(
        response_id=message.response_id,
        previous_id=message.previous_response_id if message.HasField("previous_response_id") else None,
        json=message.response_json,
        items=tuple(_item(place, each) for place, each in enumerate(message.input_items_json)),
        created_ms=message.created_unix_ms,
        finished=message.finished,
        expires_ms=message.expires_unix_ms,
    )


def _item(place: int, raw: bytes) -> Item:
    try:
        identity = json.loads(raw)["id"]
    except (ValueError, TypeError, KeyError) as error:
        path = f"response.input_items_json[{place}]"
        raise DomainError(Reason.INVALID_REQUEST, f"'{path}' is no JSON object with an id", field=path) from error
    return Item(str(identity), raw)


def _stored(response: Response) -> pb.StoredResponse:
    return pb.StoredResponse(
        response_id=response.response_id,
        previous_response_id=response.previous_id,
        response_json=response.json,
        input_items_json=[item.json for item in response.items],
        created_unix_ms=response.created_ms,
        finished=response.finished,
        expires_unix_ms=response.expires_ms,
    )
