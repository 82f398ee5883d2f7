"""Calls to diffusion: pictures while they are made, for as long as somebody waits for them, and its models."""

from typing import Any, Final, Self

import grpc.aio

from facade.door import Principal
from facade.mailbox import Mailbox
from facade.peers import Peer, failure_of
from facade.translate.failures import naming
from facade.translate.image_answers import PictureEvent
from facade.translate.image_requests import PictureCall
from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from services.kit.channels import call_metadata, ending
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner

_PEER: Final = "diffusion"
# How long the catalogue is believed, and how long a listing waits for it: it is shown beside that of llm.
_NAMES_FOR_S: Final = 10.0
_NAMES_LIMIT_S: Final = 0.5


class ImageCalls:
    """The calls to diffusion on behalf of callers. `wait_s`: for a connection; `limit_s`: for a short answer."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock, owner: Owner, *, limit_s: float, wait_s: float) -> None:
        self._peer = Peer(_PEER, channel, wait_s)
        self._stub: Any = diffusion_pb2_grpc.DiffusionServiceStub(channel)
        self._admin: Any = diffusion_pb2_grpc.DiffusionAdminServiceStub(channel)
        self._clock = clock
        self._owner = owner
        self._orders_limit_s = limit_s
        self._limit_s = min(limit_s, _NAMES_LIMIT_S)
        self._models: tuple[pb.Model, ...] = ()
        self._models_until = float("-inf")

    def pictures(self, call: PictureCall, who: Principal) -> "Pictures":
        """Return the pictures that a call asks for, to be begun by entering them."""
        return Pictures(call, who, self._peer, getattr(self._stub, call.method.value), self._owner)

    async def clear_teleport(self, request: pb.ClearTeleportRequest, who: Principal) -> pb.ClearTeleportResponse:
        """Empty exact caches; return what that was. Raises DomainError."""
        answer: pb.ClearTeleportResponse = await self._peer.ask(
            self._admin.ClearTeleport, request, who, limit_s=self._orders_limit_s
        )
        return answer

    async def catalogue(self, who: Principal) -> tuple[pb.Model, ...]:
        """Return the models of pictures as known a short while ago; none while diffusion does not tell."""
        if self._clock.monotonic() >= self._models_until:
            self._models_until = self._clock.monotonic() + _NAMES_FOR_S
            try:
                listed = await self._peer.ask(
                    self._stub.ListModels, pb.ListModelsRequest(), who, limit_s=self._limit_s, wait_s=self._limit_s
                )
            except DomainError:
                self._models = ()
            else:
                self._models = tuple(listed.models)
        return self._models


class Pictures:
    """The pictures of one request in the making. Leaving the block cancels what still runs."""

    def __init__(self, call: PictureCall, who: Principal, peer: Peer, method: Any, owner: Owner) -> None:  # noqa: ANN401 - an RPC
        self._call = call
        self._who = who
        self._peer = peer
        self._method = method
        self._owner = owner
        self._mailbox: Mailbox[PictureEvent] = Mailbox()
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the engine has said that all is done, and that has been taken."""
        return self._finished

    async def take(self) -> list[PictureEvent]:
        """Wait for events and return all there are. Raises the DomainError that ended the request. Safe to cancel."""
        with naming(self._call.rest_field):
            events = await self._mailbox.take()
        self._finished = events[-1].HasField("done")
        return events

    def abandon(self) -> None:
        """Say that the caller has gone."""
        self._mailbox.fail(DomainError(Reason.CANCELLED, "The caller has gone."))
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            await self._peer.ready(self._peer.wait_s)
            metadata = call_metadata(client=self._who.client, tier=self._who.tier, request_id=self._who.request_id)
            with ending(self._method(self._call.request, metadata=metadata)) as events:
                async for event in events:
                    self._mailbox.put(event)
            self._mailbox.fail(DomainError(Reason.ENGINE_FAILED, "The pictures were cut short."))
        except grpc.aio.AioRpcError as error:
            self._mailbox.fail(failure_of(error, peer=_PEER, limit_s=None))
        except DomainError as error:
            self._mailbox.fail(error)

    def __enter__(self) -> Self:
        self._reading = self._owner.start(self._read(), name="pictures")
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.cancel()
