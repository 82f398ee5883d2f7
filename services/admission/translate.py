"""Proto to values and back."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from omniserve.admission.v1 import admission_pb2 as pb
from services.admission.core.desk import SETTLING
from services.admission.core.intake import Wish
from services.admission.core.model import (
    ALL_MODALITIES,
    Ask,
    Event,
    Granted,
    Hold,
    Modality,
    Queued,
    Refusal,
    Rejected,
    Tier,
    YieldRequested,
)
from services.admission.core.snapshot import PoolView, Pressure, TierView
from services.kit.errors import DomainError, Reason

_MODALITIES = {int(one): one for one in Modality}
_TIERS = {int(one): one for one in Tier}
REASONS = {refusal: Reason(refusal.value) for refusal in Refusal}

Told = pb.Queued | pb.Granted | pb.YieldRequested | pb.Rejected


def wish(ask: pb.Ask) -> Wish:
    """Return what the caller said. Enum numbers that the contract does not have count as not stated."""
    return Wish(
        modality=_modality(ask.modality),
        tier=_tier(ask.tier),
        units=ask.units if ask.HasField("units") else None,
        may_wait=ask.mode != pb.MODE_TRY,
        wait_s=ask.wait_ms / 1000 if ask.HasField("wait_ms") else None,
        principal=ask.principal,
        pool=ask.pool if ask.HasField("pool") else None,
    )


def held(permit: pb.HeldPermit) -> Wish:
    """Return what a session that comes back says it holds; its slots are in use whatever the settings say now."""
    return replace(wish(permit.ask), units=None)


def told(event: Event, ask: Ask, permit_id: str) -> tuple[str, Told]:
    """Return an event's name in the contract and its message. `permit_id` and `ask` are those of the event's ticket."""
    match event:
        case Queued():
            eta = None if event.eta_s is None else milliseconds(event.eta_s)
            return "queued", pb.Queued(position=event.position, eta_ms=eta)
        case Granted():
            granted = pb.Granted(
                permit_id=permit_id,
                waited_ms=milliseconds(event.waited_s),
                units=ask.units,
                pool=ask.pool,
                tier=_tier_number(ask.tier),
            )
            return "granted", granted
        case YieldRequested():
            return "yield_requested", pb.YieldRequested(waiting_tier=_tier_number(event.waiting_tier))
        case Rejected():
            return "rejected", rejected(event.refusal, event.message, event.retry_after_s)


def rejected(refusal: Refusal, message: str, retry_after_s: float | None = None) -> pb.Rejected:
    """Return a refusal as the contract puts it."""
    retry_after = None if retry_after_s is None else milliseconds(retry_after_s)
    return pb.Rejected(reason=refusal.value, message=message, retry_after_ms=retry_after)


def refusal_error(event: Rejected) -> DomainError:
    """Return the error with which a single caller's stream ends."""
    retry_after = None if event.retry_after_s is None else milliseconds(event.retry_after_s)
    return DomainError(REASONS[event.refusal], event.message, retry_after_ms=retry_after)


def hold(request: pb.HoldRequest, *, hold_id: str, pools: frozenset[str], excluded: frozenset[int], now: float) -> Hold:
    """Return the hold that is asked for. Raises DomainError for what is out of range."""
    if hold_id == SETTLING:
        raise DomainError(Reason.INVALID_REQUEST, f"'hold_id' {hold_id!r} is admission's own", field="hold_id")
    if not 1 <= request.seconds <= 3600:
        message = f"'seconds' is {request.seconds}; it must be 1 to 3600"
        raise DomainError(Reason.INVALID_REQUEST, message, field="seconds")
    if request.HasField("pool") and request.pool not in pools:
        known = ", ".join(sorted(pools))
        raise DomainError(Reason.NOT_FOUND, f"no pool {request.pool!r}; there are {known}", field="pool")
    modalities = [_modality(number) for number in request.modalities]
    if None in modalities:
        raise DomainError(Reason.INVALID_REQUEST, "'modalities' has an unknown modality", field="modalities")
    return Hold(
        hold_id=hold_id,
        pools=frozenset({request.pool}) if request.HasField("pool") else pools,
        modalities=frozenset(one for one in modalities if one is not None) or ALL_MODALITIES,
        until=now + request.seconds,
        reason=request.reason,
        excluded=excluded,
    )


def pool_status(view: PoolView, now: float) -> pb.PoolStatus:
    """Return one pool's state."""
    return pb.PoolStatus(
        name=view.name,
        slots=view.slots,
        in_use=view.in_use,
        permits=view.permits,
        waiting=view.waiting,
        max_waiting=view.max_waiting,
        max_in_use=view.max_in_use,
        tiers=[_tier_status(tier) for tier in view.tiers],
        holds=[_hold_status(one, now) for one in view.holds],
        drain_rate_per_s=view.drain_rate,
    )


def pressures(found: Iterable[Pressure]) -> list[pb.Pressure]:
    """Return the queues."""
    return [
        pb.Pressure(
            pool=one.pool,
            tier=_tier_number(one.tier),
            modality=_modality_number(one.modality),
            depth=one.depth,
            worst_wait_ms=milliseconds(one.worst_wait_s),
        )
        for one in found
    ]


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, never fewer than the time given."""
    return max(0, math.ceil(seconds * 1000))


def _tier_status(view: TierView) -> pb.TierStatus:
    return pb.TierStatus(
        tier=_tier_number(view.tier),
        waiting=view.waiting,
        granted_total=view.granted,
        rejected_total=view.rejected,
        timeout_total=view.timed_out,
        cancelled_total=view.cancelled,
        worst_wait_ms=milliseconds(view.worst_wait_s),
    )


def _hold_status(hold: Hold, now: float) -> pb.HoldStatus:
    modalities = [] if hold.modalities == ALL_MODALITIES else sorted(hold.modalities)
    return pb.HoldStatus(
        hold_id=hold.hold_id,
        reason=hold.reason,
        modalities=[_modality_number(one) for one in modalities],
        remaining_ms=milliseconds(hold.until - now),
    )


def _modality(number: int) -> Modality | None:
    return _MODALITIES.get(number)


def _tier(number: int) -> Tier | None:
    return _TIERS.get(number)


def _tier_number(tier: Tier) -> "pb.Tier.ValueType":
    return cast("pb.Tier.ValueType", tier.value)


def _modality_number(modality: Modality) -> "pb.Modality.ValueType":
    return cast("pb.Modality.ValueType", modality.value)
