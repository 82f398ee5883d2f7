"""What is asked for, and what came of it: requests, grants and errors. No I/O."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import grpc

from omniserve.admission.v1 import admission_pb2
from omniserve.vram.v1 import vram_pb2 as pb

Tier: TypeAlias = Literal["paid", "sub", "free", "background"]
Metadata: TypeAlias = Sequence[tuple[str, str]]

# A broker that is being restarted, or a door that cannot reach it: ask again.
_AWAY: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


class LeaseDeniedError(Exception):
    """There is no room. `reason`: e.g. `no_headroom`; `headroom_mib`: by device; `retry_after_s`: None when unknown."""

    def __init__(self, response: pb.LeaseResponse) -> None:
        denied = response.denied
        super().__init__(denied.message)
        self.message = denied.message
        self.reason = pb.DenialReason.Name(denied.reason).removeprefix("DENIAL_REASON_").lower()
        self.headroom_mib: Mapping[str, int] = dict(response.headroom_mib)
        self.retry_after_s = denied.retry_after_ms / 1000 if denied.HasField("retry_after_ms") else None


class LeaseLostError(Exception):
    """The lease is over although it was in use; what it allowed may be granted to others."""


@dataclass(frozen=True, slots=True)
class Terms:
    """An ask. `key` lets a retry after a lost answer find the lease that was granted. Times in seconds, memory in MiB."""

    tenant: str
    sizes: Mapping[str, int]
    min_mib: int | None = None
    tier: Tier | None = None
    ttl_s: int | None = None
    purpose: str = ""
    pid: int | None = None
    wait_s: float = 0.0
    reclaim: bool = False
    reclaimable: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def request(self, allocated: Mapping[str, int], *, wait: bool = True) -> pb.LeaseRequest:
        """Return the request. `allocated`: by device, what is there already from a lease that the broker has lost."""
        items = [
            pb.LeaseItem(
                device=device or None,
                size_mib=mib,
                min_size_mib=self.min_mib,
                materialised_mib=min(mib, allocated.get(device, 0)),
            )
            for device, mib in self.sizes.items()
        ]
        return pb.LeaseRequest(
            tenant=self.tenant,
            items=items,
            tier=admission_pb2.Tier.Value(f"TIER_{(self.tier or 'unspecified').upper()}"),
            ttl_s=self.ttl_s,
            pid=self.pid,
            purpose=self.purpose,
            reclaim=self.reclaim,
            reclaimable=self.reclaimable,
            wait_ms=round(self.wait_s * 1000) if wait else None,
            idempotency_key=self.key,
        )


def sizes_of(mib: int | Mapping[str, int], device: str | None) -> dict[str, int]:
    """Return the sizes by device; "" stands for the device with the most room. Raises ValueError."""
    if isinstance(mib, int):
        return {device or "": mib}
    if device is not None:
        raise ValueError("give either sizes by device, or one size and a device")
    return dict(mib)


def metadata(token: str | None, service_token: str | None) -> Metadata:
    """Return what calls show: the operator's token to the front door, or a service's own to vram itself."""
    found: list[tuple[str, str]] = []
    if token:
        found.append(("authorization", f"Bearer {token}"))
    if service_token:
        found.append(("x-omniserve-service-token", service_token))
    return found


def is_away(error: grpc.RpcError) -> bool:
    """Return whether nobody answered, so that the same call may be made again."""
    return _code(error) in _AWAY


def is_unknown(error: grpc.RpcError) -> bool:
    """Return whether the broker does not know the lease."""
    return _code(error) is grpc.StatusCode.NOT_FOUND


def _code(error: Any) -> grpc.StatusCode:  # noqa: ANN401 - an RpcError has a code only where it is a call too
    code: grpc.StatusCode = error.code()
    return code
