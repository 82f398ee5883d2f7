"""GET /v1/gpu/vram and /v1/host/memory, POST /v1/gpu/lease, /v1/gpu/renew and /v1/gpu/release: requests and answers. Pure.

Names are the contract's; enums are words, such as `no_headroom` for DENIAL_REASON_NO_HEADROOM. A lease of one device may
be asked for without `items`.
"""

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message import Message

from facade.translate.fields import Boolean, Choice, Integer, ListOf, Number, Text, refuse
from facade.translate.record import Field, record
from facade.translate.state import plain
from omniserve.admission.v1 import admission_pb2
from omniserve.vram.v1 import vram_pb2 as pb
from services.kit.errors import DomainError

Json = dict[str, Any]

_MOST_MIB: Final = 2**31
_SIZE: Final = Integer(1, _MOST_MIB)
_ALLOCATED: Final = Integer(0, _MOST_MIB)
_DEVICE: Final = Text(1, 16)
_TTL: Final = Integer(1, 86_400)
_PID: Final = Integer(1, 2**31 - 1)
_TIERS: Final = ("paid", "sub", "free", "background")


def _words(enum: Any, prefix: str) -> tuple[str, ...]:  # noqa: ANN401 - a protobuf enum
    return tuple(name.removeprefix(prefix).lower() for name in enum.keys() if not name.endswith("_UNSPECIFIED"))  # noqa: SIM118 - no mapping


_ENDS: Final = _words(pb.LeaseEnd, "LEASE_END_")
_ANSWERS: Final = _words(pb.ReclaimAnswer, "RECLAIM_ANSWER_")

_WANTED: Final = (
    Field("device", _DEVICE, "gpu0, gpu1, ... or cpu; absent takes the device with the most room."),
    Field("size_mib", _SIZE, "Memory wanted, MiB."),
    Field("min_size_mib", _SIZE, "Least that is of use; absent means all of it or nothing."),
    Field("materialised_mib", _ALLOCATED, "Of it, what is allocated already; absent means nothing."),
)
_ITEM: Final = record(
    [each if each.name != "size_mib" else Field("size_mib", _SIZE, each.sentence, required=True) for each in _WANTED]
)
LEASE: Final = record(
    (
        Field("tenant", Text(1, 128), "Who asks.", required=True),
        Field("items", ListOf(_ITEM, 1, 32), "What is wanted, one item per device; granted together or not at all."),
        *_WANTED,
        Field(
            "tier", Choice(_TIERS), "How deep into the keep-free floor it may reach; absent means the caller's tier."
        ),
        Field("ttl_s", _TTL, "Seconds until it ends unless renewed."),
        Field("pid", _PID, "Process that will allocate."),
        Field("reclaimable", Boolean(), "The tenant watches (gRPC), and gives this memory back when asked."),
        Field("purpose", Text(0, 256), "What it is for."),
        Field("reclaim", Boolean(), "Ask reclaimable tenants to make room when there is too little."),
        Field("wait_ms", Integer(0, 600_000), "How long to wait for room, milliseconds."),
        Field("idempotency_key", Text(1, 128), "Names this ask, so that a retry does not lease twice."),
        Field("reload_cost_s", Number(0, 1e9), "Expected seconds to load again after a reclaim."),
    )
)
RENEW: Final = record(
    (
        Field("lease_id", Text(1, 128), "The lease.", required=True),
        Field(
            "items",
            ListOf(
                record(
                    (
                        Field("device", _DEVICE, "The device.", required=True),
                        Field("materialised_mib", _ALLOCATED, "Allocated of it now."),
                        Field("size_mib", _SIZE, "New size, not above the present one."),
                    )
                ),
                0,
                32,
            ),
            "Report by device; a device that is missing stays as it was.",
        ),
        Field("ttl_s", _TTL, "New TTL, seconds; absent keeps it."),
        Field("reclaimable", Boolean(), "Whether the memory may be asked back from now on; absent keeps it."),
        Field("pid", _PID, "Process that allocates; absent keeps it."),
        Field("reclaim_id", Text(1, 128), "The reclaim request that this answers."),
        Field("reclaim_answer", Choice(_ANSWERS), "The answer, with reclaim_id."),
    )
)
RELEASE: Final = record(
    (
        Field("lease_id", Text(1, 128), "The lease.", required=True),
        Field("reason", Choice(_ENDS), "Why, for the counters; absent counts as done."),
        Field("reclaim_id", Text(1, 128), "The reclaim request that this answers."),
    )
)


def read_lease(body: Mapping[str, Any]) -> tuple[pb.LeaseRequest, bool]:
    """Translate a body into the request, and whether it had no `items`; DomainError invalid_request names the field at fault."""
    values = LEASE.read(body, "")
    short = {field.name: values.pop(field.name) for field in _WANTED if field.name in values}
    if "items" in values and short:
        refuse(next(iter(short)), "cannot be combined with 'items'")
    if "items" not in values:
        if "size_mib" not in short:
            refuse("size_mib", "is required: give 'size_mib' or 'items'", code="missing_required_parameter")
        values["items"] = [short]
    values["items"] = [pb.LeaseItem(**item) for item in values["items"]]
    if "tier" in values:
        values["tier"] = admission_pb2.Tier.Value(f"TIER_{values['tier'].upper()}")
    return pb.LeaseRequest(**values), bool(short)


def without_items(error: DomainError) -> DomainError:
    """Return an error about the only item of a lease in the names of a body that had no `items`."""
    field = (error.field or "").removeprefix("items[0].") or None
    return DomainError(
        error.reason, error.message, field=field, retry_after_ms=error.retry_after_ms, metadata=error.metadata
    )


def read_renew(body: Mapping[str, Any]) -> pb.RenewRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = RENEW.read(body, "")
    values["items"] = [pb.RenewItem(**item) for item in values.get("items", ())]
    if "reclaim_answer" in values:
        values["reclaim_answer"] = pb.ReclaimAnswer.Value(f"RECLAIM_ANSWER_{values['reclaim_answer'].upper()}")
    return pb.RenewRequest(**values)


def read_release(body: Mapping[str, Any]) -> pb.ReleaseRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = RELEASE.read(body, "")
    if "reason" in values:
        values["reason"] = pb.LeaseEnd.Value(f"LEASE_END_{values['reason'].upper()}")
    return pb.ReleaseRequest(**values)


def lease_answer(response: pb.LeaseResponse) -> Json:
    """Return the answer to an ask; for a denial what stood in the way stands beside `granted`."""
    headroom = dict(response.headroom_mib)
    if response.granted:
        return {
            "granted": True,
            "lease_id": response.lease_id,
            "items": [worded(item) for item in response.items],
            "size_mib": sum(item.size_mib for item in response.items),
            "ttl_s": response.ttl_s,
            "headroom_mib": headroom,
        }
    return {"granted": False, **worded(response.denied), "headroom_mib": headroom}


def state(response: pb.GetStateResponse) -> Json:
    """Return the whole account, led by the figures that dashboards look for."""
    return {**figures(response), **worded(response)}


def public_state(response: pb.GetStateResponse) -> Json:
    """Return the account as callers with a key may see it: a lease's id is what renews and releases it."""
    shown = state(response)
    shown["leases"] = [
        {name: value for name, value in lease.items() if name not in {"lease_id", "reclaim_id"}}
        for lease in shown["leases"]
    ]
    for device in shown["devices"]:
        del device["processes"]
    return shown


def figures(response: pb.GetStateResponse) -> Json:
    """Return the account in the names that dashboards know.

    Free memory is -1 while any driver does not answer, which is not 0; headroom, what every tier can get, is then absent.
    """
    devices = response.devices
    known = bool(devices) and all(device.driver == pb.DRIVER_STATE_OK for device in devices)
    found: Json = {
        "vram_available": known,
        "omniserve_vram_free_gib": round(sum(each.free_mib for each in devices) / 1024, 3) if known else -1,
        "omniserve_vram_leases": len(response.leases),
        "omniserve_vram_leased_mb": sum(device.granted_mib for device in devices),
        "omniserve_vram_denials_total": sum(response.counters.denied_total.values()),
        "omniserve_vram_lease_expiries_total": response.counters.ended_total.get("LEASE_END_EXPIRED", 0),
        "omniserve_vram_evictions_total": {
            name.removeprefix("LEASE_END_").lower(): count
            for name, count in sorted(response.counters.ended_total.items())
            if name in _EVICTIONS
        },
    }
    if known:
        least = [min((tier.headroom_mib for tier in device.headroom), default=0) for device in devices]
        found["omniserve_vram_headroom_mb"] = sum(least)
    return found


_EVICTIONS: Final = frozenset(
    f"LEASE_END_{name}" for name in ("IDLE", "EVICTED", "RECLAIMED", "CRASHED", "REVOKED", "LOAD_FAILED", "SHUTDOWN")
)


def worded(message: Message) -> Json:
    """Return a message as JSON with its enums as words."""
    told: Json = _lowered(plain(message))
    return told


def _lowered(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {_word(name): _lowered(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_lowered(each) for each in value]
    return _word(value) if isinstance(value, str) else value


def _word(text: str) -> str:
    """Return a name of an enum as the word it stands for; any other text as it is."""
    return _WORDS.get(text, text)


_WORDS: Final[Mapping[str, str]] = {
    name: name.removeprefix(prefix).lower()
    for enum, prefix in (
        (pb.DenialReason, "DENIAL_REASON_"),
        (pb.LeaseEnd, "LEASE_END_"),
        (pb.DeviceKind, "DEVICE_KIND_"),
        (pb.DriverState, "DRIVER_STATE_"),
        (pb.MaterialisedSource, "MATERIALISED_SOURCE_"),
        (pb.WarmState, "WARM_STATE_"),
        (admission_pb2.Tier, "TIER_"),
    )
    for name in enum.keys()  # noqa: SIM118 - no mapping
}
