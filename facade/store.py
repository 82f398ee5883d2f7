"""The calls to jobs, which keeps responses: on behalf of their owners, so nobody sees another's."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import grpc.aio
import orjson
from google.protobuf.message import Message

from facade.door import Principal
from facade.peers import Peer
from facade.translate.failures import Names
from omniserve.jobs.v1 import jobs_pb2, jobs_pb2_grpc
from services.kit.errors import DomainError, Reason

R = TypeVar("R")

# A conversation longer than a model's context is of no use, and its start is what goes first.
_MOST_BEFORE: Final = 256
_NAMES: Final = Names({"page_size": "limit", "response": "input"})
_FOLLOWING: Final = Names({"response_id": "previous_response_id"})


class ResponseStore:
    """Saves, finds and removes responses. `wait_s`: for a connection; `limit_s`: for an answer."""

    def __init__(self, channel: grpc.aio.Channel, *, limit_s: float, wait_s: float) -> None:
        self._peer = Peer("jobs", channel, wait_s)
        self._stub: Any = jobs_pb2_grpc.JobsStoreServiceStub(channel)
        self._limit_s = limit_s

    async def save(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]], who: Principal) -> None:
        """Keep a finished response with its input. Raises DomainError."""
        stored = jobs_pb2.StoredResponse(
            response_id=response["id"],
            previous_response_id=response["previous_response_id"],
            response_json=orjson.dumps(response),
            input_items_json=[orjson.dumps(item) for item in items],
            created_unix_ms=int(response["created_at"] * 1000),
            finished=True,
        )
        await self._ask(self._stub.SaveResponse, jobs_pb2.SaveResponseRequest(response=stored), who)

    async def get(self, response_id: str, who: Principal) -> dict[str, Any]:
        """Return a response. Raises DomainError not_found."""
        request = jobs_pb2.GetResponseRequest(response_id=response_id)
        found: jobs_pb2.GetResponseResponse = await self._ask(self._stub.GetResponse, request, who)
        response: dict[str, Any] = orjson.loads(found.response.response_json)
        return response

    async def conversation(self, response_id: str, who: Principal) -> list[dict[str, Any]]:
        """Return the items of a response and of those before it, input and output, oldest first. Raises DomainError."""
        request = jobs_pb2.GetResponseRequest(response_id=response_id, history=_MOST_BEFORE)
        found: jobs_pb2.GetResponseResponse = await self._ask(self._stub.GetResponse, request, who, _FOLLOWING)
        items: list[dict[str, Any]] = []
        for each in (*found.history, found.response):
            items += (orjson.loads(item) for item in each.input_items_json)
            items += orjson.loads(each.response_json)["output"]
        return items

    async def delete(self, response_id: str, who: Principal) -> None:
        """Remove a response. Raises DomainError not_found."""
        request = jobs_pb2.DeleteResponseRequest(response_id=response_id)
        found: jobs_pb2.DeleteResponseResponse = await self._ask(self._stub.DeleteResponse, request, who)
        if not found.deleted:
            raise DomainError(Reason.NOT_FOUND, f"there is no response {response_id[:128]!r}", field="response_id")

    async def items(
        self, response_id: str, who: Principal, *, ascending: bool, after: str | None, size: int
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of a response's input items and whether more follow. Raises DomainError not_found."""
        request = jobs_pb2.ListInputItemsRequest(
            response_id=response_id, ascending=ascending, after=after, page_size=size
        )
        found: jobs_pb2.ListInputItemsResponse = await self._ask(self._stub.ListInputItems, request, who)
        return [orjson.loads(item) for item in found.items_json], found.has_more

    async def _ask(
        self, call: Callable[..., Awaitable[R]], request: Message, who: Principal, names: Names = _NAMES
    ) -> R:
        return await self._peer.ask(call, request, who, limit_s=self._limit_s, names=names)
