"""Pictures that callers fetch later by a signed URL: jobs keeps them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc.aio

from facade.door import Principal
from facade.peers import Peer, failure_of, told
from omniserve.jobs.v1 import jobs_pb2 as pb
from omniserve.jobs.v1 import jobs_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.kit.channels import call_metadata, ending
from services.kit.errors import DomainError, Reason

_PEER: Final = "jobs"
_PIECE_BYTES: Final = 1024 * 1024


class KeptPictures:
    """Saves and finds pictures. All raise DomainError. `wait_s`: for a connection; `limit_s`: for an answer."""

    def __init__(self, channel: grpc.aio.Channel, *, limit_s: float, wait_s: float) -> None:
        self._peer = Peer(_PEER, channel, wait_s)
        self._stub: Any = jobs_pb2_grpc.JobsStoreServiceStub(channel)
        self._limit_s = limit_s

    async def ready(self) -> None:
        """Wait until pictures can be saved."""
        await self._peer.ready(self._peer.wait_s)

    async def save(self, image: media_pb2.ImageOutput, who: Principal) -> str:
        """Keep a picture; return where its owner finds it."""
        call = self._stub.SaveImage(_pieces(image), timeout=self._limit_s, metadata=_metadata(who))
        saved: pb.SaveImageResponse = await told(call, peer=_PEER, limit_s=self._limit_s)
        return saved.url

    @asynccontextmanager
    async def opened(
        self, request: pb.ReadSignedImageRequest, who: Principal
    ) -> AsyncIterator[tuple[pb.MediaHead, AsyncIterator[bytes]]]:
        """Open a picture for the length of the block; return what it is and its pieces."""
        await self.ready()
        with ending(self._stub.ReadSignedImage(request, metadata=_metadata(who))) as call:
            messages = _said(call)
            first = await anext(messages, None)
            if first is None:
                raise DomainError(Reason.UPSTREAM_FAILED, "The picture was cut short.")
            yield first.head, _data(messages)


def _metadata(who: Principal) -> Any:  # noqa: ANN401 - gRPC's
    return call_metadata(client=who.client, tier=who.tier, request_id=who.request_id)


async def _pieces(image: media_pb2.ImageOutput) -> AsyncIterator[pb.SaveImageRequest]:
    yield pb.SaveImageRequest(head=pb.ImageHead(format=image.format, size_bytes=len(image.data)))
    for start in range(0, len(image.data), _PIECE_BYTES):
        yield pb.SaveImageRequest(data=image.data[start : start + _PIECE_BYTES])


async def _said(call: Any) -> AsyncIterator[pb.ReadSignedImageResponse]:  # noqa: ANN401 - gRPC's call
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, peer=_PEER, limit_s=None) from error


async def _data(messages: AsyncIterator[pb.ReadSignedImageResponse]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message.data
