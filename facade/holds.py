"""Calls to admission on behalf of the operator."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import Message

from facade.door import Principal
from facade.peers import reached, told
from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc
from services.kit.channels import call_metadata

R = TypeVar("R")

# Beyond the time that a hold may wait for what is in flight.
_MARGIN_S: Final = 5.0


class HoldCalls:
    """Holds and their ends. All raise DomainError. `wait_s`: for a connection; `limit_s`: for an answer."""

    def __init__(self, channel: grpc.aio.Channel, *, limit_s: float, wait_s: float) -> None:
        self._channel = channel
        self._stub: Any = admission_pb2_grpc.AdmissionAdminServiceStub(channel)
        self._limit_s = limit_s
        self._wait_s = wait_s

    async def hold(self, request: pb.HoldRequest, who: Principal) -> pb.HoldResponse:
        """Put a hold in force and wait as long as it asks for what is in flight."""
        limit_s = max(self._limit_s, request.wait_ms / 1000 + _MARGIN_S)
        answer: pb.HoldResponse = await self._ask(self._stub.Hold, request, who, limit_s)
        return answer

    async def release(self, request: pb.ReleaseHoldRequest, who: Principal) -> pb.ReleaseHoldResponse:
        """End a hold, or all."""
        answer: pb.ReleaseHoldResponse = await self._ask(self._stub.ReleaseHold, request, who, self._limit_s)
        return answer

    async def _ask(self, call: Callable[..., Awaitable[R]], request: Message, who: Principal, limit_s: float) -> R:
        await reached(self._channel, peer="admission", wait_s=self._wait_s)
        metadata = call_metadata(client=who.client, tier=who.tier, request_id=who.request_id)
        return await told(call(request, timeout=limit_s, metadata=metadata), peer="admission", limit_s=limit_s)
