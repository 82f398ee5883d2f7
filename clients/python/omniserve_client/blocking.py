"""Leases for programs with threads."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import grpc

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


class Lease:
    """A lease that is held. Use it as a context manager: it is released when the block ends."""

    def __init__(
        self,
        client: "LeaseClient",
        state: Hold,
        on_lost: "Callable[[Lease], None] | None",
        on_reclaim: "OnReclaim | None" = None,
    ) -> None:
        self._client = client
        self._state = state
        self._on_lost = on_lost
        self._on_reclaim = on_reclaim
        self._watching: Any = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._wake = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease {state.lease_id[:8]}", daemon=True)
        self._thread.start()
        if on_reclaim is not None:
            threading.Thread(target=self._listen, name=f"ear {state.lease_id[:8]}", daemon=True).start()

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

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the lease is lost, or the time is over; return whether it is lost."""
        return self._lost.wait(timeout_s)

    def report(self, mib: int | Mapping[str, int], *, pid: int | None = None) -> None:
        """Tell what is allocated by now, on the first device or by device, and by which process; sent at once."""
        with self._lock:
            self._state.allocated |= {self.device: mib} if isinstance(mib, int) else mib
            self._state.pid = pid if pid is not None else self._state.pid
        self._wake.set()

    def set_pid(self, pid: int) -> None:
        """Tell which process allocates, so that the driver can say how much; sent at once."""
        with self._lock:
            self._state.pid = pid
        self._wake.set()

    def release(self) -> None:
        """Give the lease back; no effect when it is over."""
        if self._over.is_set():
            return
        self._over.set()
        self._wake.set()
        if self._watching is not None:
            self._watching.cancel()
        if threading.current_thread() is not self._thread:  # `on_lost` may release, too
            self._thread.join()
        with suppress(grpc.RpcError):  # the TTL ends it then
            self._client.call("Release", self._state.end(), _GOODBYE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._over.is_set() and not self._state.is_lost:
            self._wake.wait(self._state.next_renewal_in(time.monotonic()))
            self._wake.clear()
            if not self._over.is_set():
                self._renew()
        if self._state.is_lost:
            self._lost.set()
            if self._on_lost is not None:
                self._on_lost(self)

    def _listen(self) -> None:
        while not self._over.is_set():
            self._watching = self._client.watch()
            try:
                for event in self._watching:
                    self._hear(event)
            except grpc.RpcError as error:
                if not is_away(error):
                    raise
            self._over.wait(FIRST_PAUSE_S)

    def _hear(self, event: pb.WatchResponse) -> None:
        with self._lock:
            asked = self._state.asked_back(event)
        if asked is None or self._on_reclaim is None or self._over.is_set():
            return
        reclaim_id, device, mib = asked
        keeps_mib = self._on_reclaim(self, device, mib)
        with self._lock:
            request = self._state.answer(reclaim_id, device, keeps_mib)
        if not self._over.is_set():
            with suppress(grpc.RpcError):  # then it is asked again
                self._client.call("Renew", request, _GOODBYE_S)

    def _renew(self) -> None:
        sent_at = time.monotonic()
        with self._lock:
            request = self._state.renewal()
        try:
            self._state.renewed(self._client.call("Renew", request, self._state.time_limit(sent_at)), sent_at)
        except grpc.RpcError as error:
            if is_unknown(error):
                self._ask_anew()
            elif is_away(error):
                self._state.failed(_words(error), time.monotonic())
            else:
                self._state.lose(_words(error))

    def _ask_anew(self) -> None:
        sent_at = time.monotonic()
        with self._lock:
            request = self._state.again()
        try:
            self._state.regained(self._client.call("Lease", request, self._state.time_limit(sent_at)), sent_at)
        except grpc.RpcError as error:
            self._state.failed(_words(error), time.monotonic())


OnReclaim: TypeAlias = Callable[[Lease, str, int], int | None]
"""Told the lease, the device and how much is asked back, MiB; frees it and returns what is kept, or None for not now."""


class LeaseClient:
    """A connection to the broker. `target`: the operator's front door or vram itself, host:port.

    `token`: OMNISERVE_OPERATOR_TOKEN, where the door wants it. `service_token`: for vram itself. `patience_s`: how long a
    broker that does not answer is waited for when memory is asked for.
    """

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
        self._channel = grpc.insecure_channel(target, options=(("grpc.max_reconnect_backoff_ms", 1_000),))
        self._stub: Any = vram_pb2_grpc.VramServiceStub(self._channel)

    def lease(
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
        on_lost: Callable[[Lease], None] | None = None,
        on_reclaim: OnReclaim | None = None,
    ) -> Lease:
        """Lease memory: one size, or MiB by device. Raises LeaseDeniedError, grpc.RpcError.

        `min_mib`: least that is of use. `wait_s`: how long to wait for room; `reclaim` asks others to make it. `on_lost`
        is called once, in another thread, when the lease is over although it was in use. `on_reclaim` makes the lease one
        whose memory may be asked back; it is called in another thread, and who returns 0 ends the lease then.
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
        ends = time.monotonic() + self._patience_s + wait_s
        while True:
            sent_at = time.monotonic()
            try:
                response = self.call("Lease", terms.request({}), wait_s + _MARGIN_S)
            except grpc.RpcError as error:
                if not is_away(error) or time.monotonic() >= ends:
                    raise
                time.sleep(FIRST_PAUSE_S)
                continue
            if not response.granted:
                raise LeaseDeniedError(response)
            # While it waited the answer cannot be older than the wait: the TTL starts with the grant.
            state = hold(terms, response, max(sent_at, time.monotonic() - _MARGIN_S))
            return Lease(self, state, on_lost, on_reclaim)

    def watch(self) -> Any:  # noqa: ANN401 - a call that gives WatchResponses
        """Return the stream of what the broker tells this tenant."""
        return self._stub.Watch(pb.WatchRequest(tenant=self.tenant), metadata=self._metadata)

    def call(self, method: str, request: Any, limit_s: float) -> Any:  # noqa: ANN401 - messages of the contract
        """Call an RPC of omniserve.vram.v1.VramService by name. Raises grpc.RpcError."""
        return getattr(self._stub, method)(request, timeout=limit_s, metadata=self._metadata)

    def close(self) -> None:
        """Close the connection; leases that are held are not released."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _words(error: Any) -> str:  # noqa: ANN401 - an RpcError has details only where it is a call too
    return f"{error.code().name.lower()}: {error.details()}"
