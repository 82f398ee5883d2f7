"""Calls to vram on behalf of the operator, ended when the caller leaves."""

import asyncio
from typing import Any, Final

import grpc.aio
from google.protobuf.message import Message
from starlette.types import Receive

from facade.door import Principal
from facade.peers import Peer
from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from services.kit.errors import DomainError, Reason

# Beyond the time that a lease may wait for room.
_MARGIN_S: Final = 5.0


class VramCalls:
    """The unary calls to vram. All raise DomainError. `wait_s`: for a connection; `limit_s`: for an answer."""

    def __init__(self, channel: grpc.aio.Channel, *, limit_s: float, wait_s: float) -> None:
        self._peer = Peer("vram", channel, wait_s)
        self._stub: Any = vram_pb2_grpc.VramServiceStub(channel)
        self._limit_s = limit_s

    async def lease(self, request: pb.LeaseRequest, who: Principal, receive: Receive) -> pb.LeaseResponse:
        """Ask for memory; a caller that hangs up while it waits takes nothing. The body must have been read."""
        limit_s = max(self._limit_s, request.wait_ms / 1000 + _MARGIN_S)
        answer = asyncio.ensure_future(self._told(self._stub.Lease, request, who, limit_s))
        leaves = asyncio.ensure_future(_hang_up(receive))
        try:
            await asyncio.wait((answer, leaves), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise DomainError(Reason.CANCELLED, "The caller left before there was room.")
            found: pb.LeaseResponse = answer.result()
            return found
        finally:
            leaves.cancel()
            answer.cancel()
            await asyncio.wait((answer, leaves))

    async def renew(self, request: pb.RenewRequest, who: Principal) -> pb.RenewResponse:
        """Keep a lease alive."""
        answer: pb.RenewResponse = await self._told(self._stub.Renew, request, who)
        return answer

    async def release(self, request: pb.ReleaseRequest, who: Principal) -> pb.ReleaseResponse:
        """Give a lease back."""
        answer: pb.ReleaseResponse = await self._told(self._stub.Release, request, who)
        return answer

    async def state(self, who: Principal) -> pb.GetStateResponse:
        """Return the whole account."""
        answer: pb.GetStateResponse = await self._told(self._stub.GetState, pb.GetStateRequest(), who)
        return answer

    async def host_memory(self, who: Principal) -> pb.GetHostMemoryResponse:
        """Return the host's RAM."""
        answer: pb.GetHostMemoryResponse = await self._told(self._stub.GetHostMemory, pb.GetHostMemoryRequest(), who)
        return answer

    async def _told(self, call: Any, request: Message, who: Principal, limit_s: float | None = None) -> Any:  # noqa: ANN401 - an RPC and its answer
        return await self._peer.ask(call, request, who, limit_s=limit_s or self._limit_s)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
