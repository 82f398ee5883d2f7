"""Messages to values and back."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Final

from omniserve.admission.v1 import admission_pb2
from omniserve.vram.v1 import vram_pb2 as pb
from services.kit.errors import DomainError, Reason
from services.vram.core.account import Account
from services.vram.core.ledger import Ledger
from services.vram.core.model import (
    Ask,
    Denied,
    End,
    Held,
    KeyConflictError,
    Lease,
    Refusal,
    RefusedError,
    Renewal,
    Report,
    Rules,
    Source,
    Tier,
    UnknownDeviceError,
    UnknownLeaseError,
    Wanted,
)
from services.vram.core.reclaim import Reclaim
from services.vram.core.warming import File

MIB: Final = 1024 * 1024
MOST_ITEMS: Final = 32
MOST_MIB: Final = 2**31
MOST_WAIT_MS: Final = 600_000
_TENANT_BYTES, _PURPOSE_BYTES, _KEY_BYTES, _DEVICE_BYTES = 128, 256, 128, 16


def refused(error: RefusedError) -> DomainError:
    """Return the error for callers."""
    if isinstance(error, UnknownLeaseError | UnknownDeviceError):
        return DomainError(Reason.NOT_FOUND, str(error), field=error.field)
    if isinstance(error, KeyConflictError):
        return DomainError(Reason.CONFLICT, str(error), field=error.field)
    return invalid(error.field, str(error))


def invalid(field: str, message: str) -> DomainError:
    """Return the error for a field that cannot be used."""
    return DomainError(Reason.INVALID_REQUEST, message, field=field)


# ---- requests -----------------------------------------------------------------------------------------------------


def ask(request: pb.LeaseRequest, rules: Rules, *, tier: Tier) -> Ask:
    """Return what is asked for. `tier`: the caller's, for asks that name none. Raises DomainError."""
    _text(request.tenant, "tenant", _TENANT_BYTES, needed=True)
    _text(request.purpose, "purpose", _PURPOSE_BYTES)
    _text(request.idempotency_key, "idempotency_key", _KEY_BYTES)
    if not 1 <= len(request.items) <= MOST_ITEMS:
        raise invalid("items", f"a lease has 1 to {MOST_ITEMS} items, not {len(request.items)}")
    items = tuple(_wanted(item, f"items[{index}]") for index, item in enumerate(request.items))
    if len(items) > 1:
        _named_once([item.device for item in items if item.device])
    if request.wait_ms > MOST_WAIT_MS:
        raise invalid("wait_ms", f"wait_ms is at most {MOST_WAIT_MS}, not {request.wait_ms}")
    cost = request.reload_cost_s if request.HasField("reload_cost_s") else None
    if cost is not None and not (math.isfinite(cost) and cost >= 0):
        raise invalid("reload_cost_s", f"reload_cost_s is a number of seconds, not {cost}")
    asked = _tier(request.tier, tier)
    return Ask(
        tenant=request.tenant,
        items=items,
        tier=asked,
        ttl_s=_ttl(request.ttl_s, rules) if request.HasField("ttl_s") else rules.default_ttl_s,
        pid=_pid(request.pid),
        reclaimable=request.reclaimable,
        purpose=request.purpose,
        key=request.idempotency_key,
        digest=_digest(items, asked) if request.idempotency_key else "",
        reload_cost_s=cost,
    )


def _named_once(devices: Sequence[str]) -> None:
    twice = next((name for name in devices if devices.count(name) > 1), None)
    if twice is not None:
        raise invalid("items", f"device {twice!r} is named by more than one item")


def _digest(items: tuple[Wanted, ...], tier: Tier) -> str:
    return hashlib.blake2b(repr((items, tier)).encode(), digest_size=8).hexdigest()


def renewal(request: pb.RenewRequest, rules: Rules) -> Renewal:
    """Return what a renewal changes. Raises DomainError."""
    if not request.lease_id:
        raise invalid("lease_id", "lease_id is required")
    if len(request.items) > MOST_ITEMS:
        raise invalid("items", f"a lease has at most {MOST_ITEMS} items, not {len(request.items)}")
    reports = []
    for index, item in enumerate(request.items):
        if item.HasField("size_mib") and not item.size_mib:
            raise invalid(f"items[{index}].size_mib", "size_mib is at least 1: Release gives all of a lease back")
        reports.append(
            Report(
                item.device,
                min(item.materialised_mib, MOST_MIB) if item.HasField("materialised_mib") else None,
                item.size_mib if item.HasField("size_mib") else None,
            )
        )
    return Renewal(
        reports=tuple(reports),
        ttl_s=_ttl(request.ttl_s, rules) if request.HasField("ttl_s") else None,
        reclaimable=request.reclaimable if request.HasField("reclaimable") else None,
        pid=_pid(request.pid) if request.HasField("pid") else None,
    )


def end(request: pb.ReleaseRequest) -> End:
    """Return why a lease is released; unspecified counts as done. Raises DomainError."""
    if not request.lease_id:
        raise invalid("lease_id", "lease_id is required")
    if not request.reason:
        return End.DONE
    try:
        return End(request.reason)
    except ValueError:
        raise invalid("reason", f"there is no end of a lease with the number {request.reason}") from None


def _wanted(item: pb.LeaseItem, field: str) -> Wanted:
    _text(item.device, f"{field}.device", _DEVICE_BYTES, needed=item.HasField("device"))
    if not 1 <= item.size_mib <= MOST_MIB:
        raise invalid(f"{field}.size_mib", f"size_mib is 1 to {MOST_MIB}, not {item.size_mib}")
    least = item.min_size_mib if item.HasField("min_size_mib") else item.size_mib
    if not 1 <= least <= item.size_mib:
        raise invalid(f"{field}.min_size_mib", f"min_size_mib is 1 to size_mib ({item.size_mib}), not {least}")
    if item.materialised_mib > item.size_mib:
        message = f"materialised_mib is at most size_mib ({item.size_mib}), not {item.materialised_mib}"
        raise invalid(f"{field}.materialised_mib", message)
    return Wanted(item.device, item.size_mib, least, item.materialised_mib)


def _text(text: str, field: str, most: int, *, needed: bool = False) -> None:
    if not text:
        if needed:
            raise invalid(field, f"{field} is required")
        return
    if not (text.isascii() and len(text) <= most) and len(text.encode()) > most:
        raise invalid(field, f"{field} has at most {most} bytes, not {len(text.encode())}")
    if not text.isprintable():
        raise invalid(field, f"{field} holds characters that cannot be shown")


def _ttl(ttl_s: int, rules: Rules) -> int:
    if not 1 <= ttl_s <= rules.max_ttl_s:
        raise invalid("ttl_s", f"ttl_s is 1 to {rules.max_ttl_s} (OMNISERVE_VRAM_MAX_TTL_S), not {ttl_s}")
    return ttl_s


def _tier(number: int, default: Tier) -> Tier:
    if not number:
        return default
    try:
        return Tier(number)
    except ValueError:
        raise invalid("tier", f"there is no tier with the number {number}") from None


def _pid(pid: int) -> int:
    if pid >= 2**31:
        raise invalid("pid", f"{pid} is no process id")
    return pid


# ---- answers ------------------------------------------------------------------------------------------------------


def granted(lease: Lease, ledger: Ledger) -> pb.LeaseResponse:
    """Return the answer to an ask that got its lease."""
    return pb.LeaseResponse(
        granted=True,
        lease_id=lease.lease_id,
        items=_items(lease, ledger),
        ttl_s=lease.ttl_s,
        headroom_mib=headroom(ledger, lease.tier, (item.device for item in lease.items)),
    )


def refusal_answer(denied: Denied, asked: Ask, ledger: Ledger) -> pb.LeaseResponse:
    """Return the answer to an ask that got nothing."""
    devices = [item.device for item in asked.items if item.device] or list(ledger.accounts)
    return pb.LeaseResponse(granted=False, denied=_denied(denied), headroom_mib=headroom(ledger, asked.tier, devices))


def headroom(ledger: Ledger, tier: Tier, devices: Iterable[str]) -> dict[str, int]:
    """Return the tier's room by device; without those that nobody knows."""
    rooms = {name: ledger.accounts[name].room(tier, ledger.rules) for name in devices if name in ledger.accounts}
    return {name: room for name, room in rooms.items() if room is not None}


def lease_state(lease: Lease, ledger: Ledger, now: float, reclaim: Reclaim | None = None) -> pb.LeaseState:
    """Return a lease as it stands."""
    return pb.LeaseState(
        lease_id=lease.lease_id,
        tenant=lease.tenant,
        purpose=lease.purpose,
        items=_items(lease, ledger),
        tier=admission_pb2.Tier.ValueType(lease.tier),
        ttl_s=lease.ttl_s,
        remaining_ms=milliseconds(lease.ends_at - now),
        age_ms=milliseconds(now - lease.granted_at),
        pid=lease.pid or None,
        reclaimable=lease.reclaimable,
        reclaim_id=reclaim.reclaim_id if reclaim is not None else None,
        renewals=lease.renewals,
    )


def device_state(account: Account, rules: Rules, now: float) -> pb.DeviceState:
    """Return the account of a device."""
    facts, reading, failure = account.facts, account.reading, account.failure
    state = pb.DeviceState(
        device=facts.device,
        name=facts.name,
        kind=pb.DeviceKind.ValueType(facts.kind),
        driver=pb.DRIVER_STATE_UNSPECIFIED,
        granted_mib=account.granted_mib,
        promised_mib=account.promised_mib,
        reserved_mib=rules.reserved_mib.get(facts.device, 0),
        keep_free_mib=rules.keep_free_mib,
    )
    if failure is not None:
        state.driver = pb.DRIVER_STATE_UNKNOWN
        state.driver_error = failure.message
        state.driver_retry_ms = milliseconds(failure.retry_at - now)
    if reading is not None:
        state.driver = pb.DRIVER_STATE_OK
        state.total_mib = reading.total_mib
        state.free_mib = reading.free_mib
        state.age_ms = milliseconds(now - reading.at)
        for tier in sorted(Tier, reverse=True):
            room = account.room(tier, rules)
            state.headroom.add(tier=admission_pb2.Tier.ValueType(tier), headroom_mib=room or 0)
        leased = {lease.pid: lease.lease_id for lease in account.leases() if lease.pid}
        for pid, used in sorted((reading.used_mib or {}).items(), key=lambda each: -each[1]):
            state.processes.add(pid=pid, used_mib=used, lease_id=leased.get(pid))
    return state


def counters(ledger: Ledger) -> pb.LeaseCounters:
    """Return what happened since the ledger was made."""
    counts = ledger.counts
    return pb.LeaseCounters(
        granted_total=counts.granted,
        renewed_total=counts.renewed,
        denied_total={pb.DenialReason.Name(pb.DenialReason.ValueType(why)): n for why, n in counts.denied.items()},
        ended_total={pb.LeaseEnd.Name(pb.LeaseEnd.ValueType(how)): n for how, n in counts.ended.items()},
        reclaims_total=counts.reclaims,
        reclaims_freed_total=counts.reclaims_freed,
    )


def denial(refusal: Refusal, now: float) -> pb.Denial:
    """Return a refusal for the operator."""
    return pb.Denial(
        tenant=refusal.ask.tenant,
        purpose=refusal.ask.purpose,
        items=[_asked(item) for item in refusal.ask.items],
        tier=admission_pb2.Tier.ValueType(refusal.ask.tier),
        denied=_denied(refusal.denied),
        age_ms=milliseconds(now - refusal.at),
    )


def reclaim_requested(reclaim: Reclaim, now: float) -> pb.ReclaimRequested:
    """Return a request to make room."""
    return pb.ReclaimRequested(
        reclaim_id=reclaim.reclaim_id,
        lease_id=reclaim.lease_id,
        device=reclaim.device,
        size_mib=reclaim.size_mib,
        reason=pb.ReclaimReason.ValueType(reclaim.reason),
        waiting_tier=admission_pb2.Tier.ValueType(reclaim.tier),
        within_ms=milliseconds(reclaim.until - now),
    )


def warm_file(file: File) -> pb.WarmFile:
    """Return a file of the warm set, sizes rounded up."""
    return pb.WarmFile(
        path=file.path,
        size_mib=-(-file.size // MIB),
        advised_mib=-(-file.advised // MIB),
        cached_mib=None if file.cached is None else -(-file.cached // MIB),
        state=pb.WarmState.ValueType(file.state),
        failure=file.failure or None,
        source=file.source,
    )


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, at least 0."""
    return max(0, round(seconds * 1000))


def _items(lease: Lease, ledger: Ledger) -> list[pb.LeasedItem]:
    found = []
    for item in lease.items:
        account = ledger.accounts.get(item.device)
        held = account.held(lease) if account is not None else None
        found.append(_held(held or Held(item.device, item.size_mib, 0, Source.UNKNOWN)))
    return found


def _held(held: Held) -> pb.LeasedItem:
    return pb.LeasedItem(
        device=held.device,
        size_mib=held.size_mib,
        materialised_mib=held.materialised_mib,
        source=pb.MaterialisedSource.ValueType(held.source),
    )


def _asked(item: Wanted) -> pb.LeaseItem:
    return pb.LeaseItem(
        device=item.device or None,
        size_mib=item.size_mib,
        min_size_mib=item.min_size_mib if item.min_size_mib != item.size_mib else None,
        materialised_mib=item.materialised_mib,
    )


def _denied(denied: Denied) -> pb.Denied:
    return pb.Denied(
        reason=pb.DenialReason.ValueType(denied.why),
        message=denied.message,
        device=denied.device,
        headroom_mib=denied.headroom_mib,
        retry_after_ms=None if denied.retry_after_s is None else milliseconds(denied.retry_after_s),
    )
