"""Calls to admission on behalf of the operator."""

from typing import Any, Final

import grpc.aio

from facade.door import Principal
from facade.peers import Peer
from omniserve.admission.v1 import admission_pb2 as pb
from omniserve.admission.v1 import admission_pb2_grpc

# Beyond the time that a hold may wait for what is in flight.
_MARGIN_S: Final = 5.0


class HoldCalls:
    """Holds and their ends. All raise DomainError. `wait_s`: for a connection; `limit_s`: for an answer."""

    def __init__(self, channel: grpc.aio.Channel, *, limit_s: float, wait_s: float) -> None:
        self._peer = Peer("admission", channel, wait_s)
        self._stub: Any = admission_pb2_grpc.AdmissionAdminServiceStub(channel)
        self._limit_s = limit_s

    async def hold(self, request: pb.HoldRequest, who: Principal) -> pb.HoldResponse:
        """Put a hold in force and wait as long as it asks for what is in flight."""
        limit_s = max(self._limit_s, request.wait_ms / 1000 + _MARGIN_S)
        answer: pb.HoldResponse = await self._peer.ask(self._stub.Hold, request, who, limit_s=limit_s)
        return answer

    async def release(self, request: pb.ReleaseHoldRequest, who: Principal) -> pb.ReleaseHoldResponse:
        """End a hold, or all."""
        answer: pb.ReleaseHoldResponse = await self._peer.ask(
            self._stub.ReleaseHold, request, who, limit_s=self._limit_s
        )
        return answer
