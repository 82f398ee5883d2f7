"""Leases for programs with an event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self, TypeAlias

import grpc
import grpc.aio

from omniserve.vram.v1 import vram_pb2 as pb
from omniserve.vram.v1 import vram_pb2_grpc
from omniserve_client.hold import FIRST_PAUSE_S, Hold, hold
from omniserve_client.terms import (
    LeaseDeniedError,
    LeaseLostError,
    Terms,
    Tier,
    is_away,
    is_unknown,
    metadata,
    sizes_of,
)

_GOODBYE_S: Final = 2.0
_MARGIN_S: Final = 5.0


class AsyncLease:
    """A lease that is held."""

    def __init__(self, client: "AsyncLeaseClient", state: Hold) -> None:
        self._client = client
        self._state = state
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def lease_id(self) -> str:
        """The lease's id; it changes when the broker had to be asked anew."""
        return self._state.lease_id

    @property
    def sizes(self) -> Mapping[str, int]:
        """What may be allocated, MiB by device."""
        return dict(self._state.sizes)

    @property
    def mib(self) -> int:
        """What may be allocated in all, MiB."""
        return sum(self._state.sizes.values())

    @property
    def device(self) -> str:
        """The first device."""
        return next(iter(self._state.sizes))

    @property
    def is_lost(self) -> bool:
        """Whether the lease is over although it was in use."""
        return self._lost.is_set()

    def check(self) -> None:
        """Raise LeaseLostError when the lease is lost."""
        if self.is_lost:
            raise LeaseLostError(self._state.why_lost)

    def end(self) -> pb.ReleaseRequest:
        """Return the request that gives it back."""
        return self._state.end()

    async def wait_lost(self) -> None:
        """Wait until the lease is lost."""
        await self._lost.wait()

    def report(self, mib: int | Mapping[str, int], *, pid: int | None = None) -> None:
        """Tell what is allocated by now, on the first device or by device, and by which process; sent at once."""
        self._state.allocated |= {self.device: mib} if isinstance(mib, int) else mib
        self._state.pid = pid if pid is not None else self._state.pid
        self._wake.set()

    async def listen(self, on_reclaim: "OnReclaim") -> None:
        """Hear when the memory is asked back, for ever; the client's block runs this."""
        async for event in self._client.events():
            asked = self._state.asked_back(event)
            if asked is None:
                continue
            reclaim_id, device, mib = asked
            keeps_mib = await on_reclaim(self, device, mib)
            with suppress(grpc.aio.AioRpcError):  # then it is asked again
                await self._client.call("Renew", self._state.answer(reclaim_id, device, keeps_mib), _GOODBYE_S)

    async def keep(self) -> None:
        """Renew until the lease is lost; the client's block runs this."""
        while not self._state.is_lost:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._state.next_renewal_in(time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            await self._renew()
        self._lost.set()

    async def _renew(self) -> None:
        sent_at = time.monotonic()
        try:
            answer = await self._client.call("Renew", self._state.renewal(), self._state.time_limit(sent_at))
            self._state.renewed(answer, sent_at)
        except grpc.aio.AioRpcError as error:
            if is_unknown(error):
                await self._ask_anew()
            elif is_away(error):
                self._state.failed(_words(error), time.monotonic())
            else:
                self._state.lose(_words(error))

    async def _ask_anew(self) -> None:
        sent_at = time.monotonic()
        try:
            answer = await self._client.call("Lease", self._state.again(), self._state.time_limit(sent_at))
            self._state.regained(answer, sent_at)
        except grpc.aio.AioRpcError as error:
            self._state.failed(_words(error), time.monotonic())


OnReclaim: TypeAlias = Callable[[AsyncLease, str, int], Awaitable[int | None]]
"""Told the lease, the device and how much is asked back, MiB; frees it and returns what is kept, or None for not now."""


class AsyncLeaseClient:
    """A connection to the broker; arguments as for LeaseClient."""

    def __init__(
        self,
        target: str = "127.0.0.1:8792",
        *,
        tenant: str,
        token: str | None = None,
        service_token: str | None = None,
        patience_s: float = 10.0,
    ) -> None:
        self.tenant = tenant
        self._patience_s = patience_s
        self._metadata = metadata(token, service_token)
        self._channel = grpc.aio.insecure_channel(target, options=(("grpc.max_reconnect_backoff_ms", 1_000),))
        self._stub = vram_pb2_grpc.VramServiceStub(self._channel)

    @asynccontextmanager
    async def lease(
        self,
        mib: int | Mapping[str, int],
        *,
        device: str | None = None,
        min_mib: int | None = None,
        tier: Tier | None = None,
        ttl_s: int | None = None,
        purpose: str = "",
        pid: int | None = None,
        wait_s: float = 0.0,
        reclaim: bool = False,
        on_lost: Callable[[AsyncLease], None] | None = None,
        on_reclaim: OnReclaim | None = None,
    ) -> AsyncIterator[AsyncLease]:
        """Lease memory for the length of a block; arguments as for LeaseClient.lease, `on_reclaim` being awaited.

        Raises LeaseDeniedError, grpc.aio.AioRpcError. Cancelled while it waits, it takes nothing.
        """
        terms = Terms(
            tenant=self.tenant,
            sizes=sizes_of(mib, device),
            min_mib=min_mib,
            tier=tier,
            ttl_s=ttl_s,
            purpose=purpose,
            pid=pid,
            wait_s=wait_s,
            reclaim=reclaim,
            reclaimable=on_reclaim is not None,
        )
        lease = AsyncLease(self, await self._granted(terms))
        keeper = asyncio.ensure_future(lease.keep())
        if on_lost is not None:
            keeper.add_done_callback(lambda done: None if done.cancelled() else on_lost(lease))
        tasks = [keeper, *([] if on_reclaim is None else [asyncio.ensure_future(lease.listen(on_reclaim))])]
        try:
            yield lease
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            with suppress(grpc.aio.AioRpcError):  # the TTL ends it then
                await self.call("Release", lease.end(), _GOODBYE_S)

    async def _granted(self, terms: Terms) -> Hold:
        ends = time.monotonic() + self._patience_s + terms.wait_s
        while True:
            sent_at = time.monotonic()
            try:
                response = await self.call("Lease", terms.request({}), terms.wait_s + _MARGIN_S)
            except grpc.aio.AioRpcError as error:
                if not is_away(error) or time.monotonic() >= ends:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S)
                continue
            if not response.granted:
                raise LeaseDeniedError(response)
            return hold(terms, response, max(sent_at, time.monotonic() - _MARGIN_S))

    async def call(self, method: str, request: Any, limit_s: float) -> Any:  # noqa: ANN401 - messages of the contract
        """Call an RPC of omniserve.vram.v1.VramService by name. Raises grpc.aio.AioRpcError."""
        return await getattr(self._stub, method)(request, timeout=limit_s, metadata=self._metadata)

    async def events(self) -> AsyncIterator[pb.WatchResponse]:
        """Give what the broker tells this tenant, for ever; a connection that breaks is made anew."""
        while True:
            watching = self._stub.Watch(pb.WatchRequest(tenant=self.tenant), metadata=self._metadata)
            try:
                async for event in watching:
                    yield event
            except grpc.aio.AioRpcError as error:
                if not is_away(error):
                    raise
            finally:
                watching.cancel()
            await asyncio.sleep(FIRST_PAUSE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower()}: {error.details()}"
