"""The gRPC face of jobs: messages to values and back. Decides nothing."""
# ruff: noqa: ARG002, N802 - servicers have the contract's names and arguments

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc.aio

from omniserve.jobs.v1 import jobs_pb2 as pb
from omniserve.jobs.v1 import jobs_pb2_grpc
from services.jobs.adapters import responses
from services.jobs.adapters.journal import Journal
from services.jobs.core.responses import Bounds, Item, Response, check_history, check_id, check_page, check_response
from services.kit.access import caller_of
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason

SERVICES: Final = ("omniserve.jobs.v1.JobsStoreService",)

Context = grpc.aio.ServicerContext[Any, Any]


class JobsStoreServicer(jobs_pb2_grpc.JobsStoreServiceServicer):
    """Keeps responses for the facade; each belongs to the client that the call is for."""

    def __init__(self, journal: Journal, clock: Clock, bounds: Bounds) -> None:
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
        """Refused: pictures are not kept yet."""
        raise _no_pictures()

    async def ReadSignedImage(
        self, request: pb.ReadSignedImageRequest, context: Context
    ) -> AsyncIterator[pb.ReadSignedImageResponse]:
        """Refused, as SaveImage."""
        raise _no_pictures()
        yield pb.ReadSignedImageResponse()  # makes it a stream


def _no_pictures() -> DomainError:
    return DomainError(Reason.UNSUPPORTED, "this server keeps responses, and no pictures yet")


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
