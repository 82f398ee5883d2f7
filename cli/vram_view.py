"""What `omniserve vram` shows of the answer of /v1/gpu/vram. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Answer = dict[str, Any]
Rows = list[tuple[str, ...]]

_TIERS: Final = ("paid", "sub", "free", "background")
DEVICES: Final = ("DEVICE", "NAME", "TOTAL", "FREE", "LEASED", "PROMISED", "RESERVED", "ROOM paid/sub/free/background")
LEASES: Final = (
    "LEASE",
    "TENANT",
    "FOR",
    "DEVICE",
    "MIB",
    "ALLOCATED",
    "TIER",
    "ENDS IN",
    "AGE",
    "PID",
    "MAY BE ASKED",
)
RESERVES: Final = ("RESERVED FOR", "DEVICE", "MIB")
DENIALS: Final = ("DENIED", "FOR", "WANTED", "TIER", "AGO", "REASON", "WHY")


def trouble(state: Answer) -> str | None:
    """Return one line about what is not well, or None."""
    if not state.get("enabled", True):
        return "the memory broker is switched off: OMNISERVE_VRAM_BROKER=0"
    if "settling_ms" in state:
        seconds = _number(state["settling_ms"]) / 1000
        return f"the stored leases could not be read: nothing is granted for another {_time(seconds)}"
    unknown = [each for each in _objects(state.get("devices")) if each.get("driver") == "unknown"]
    if not unknown:
        return None
    said = "; ".join(f"{_text(each.get('device'))}: {_text(each.get('driver_error'))}" for each in unknown)
    return f"what is free is not known, so nothing is granted there: {said}"


def devices(state: Answer) -> Rows:
    """Return a line for each device."""
    return [
        (
            _text(each.get("device")),
            _text(each.get("name")),
            _mib(each.get("total_mib")),
            _mib(each.get("free_mib")),
            _mib(each.get("granted_mib")),
            _mib(each.get("promised_mib")),
            _mib(each.get("reserved_mib")),
            "/".join(_rooms(each)) or "unknown",
        )
        for each in _objects(state.get("devices"))
    ]


def leases(state: Answer) -> Rows:
    """Return a line for each device of each lease; what the lease has in common stands in its first."""
    found: Rows = []
    for lease in _objects(state.get("leases")):
        head: tuple[str, ...] = (
            _text(lease.get("lease_id"))[:8],
            _text(lease.get("tenant")),
            _text(lease.get("purpose")),
        )
        tail: tuple[str, ...] = (
            _text(lease.get("tier")),
            _time(_number(lease.get("remaining_ms")) / 1000),
            _time(_number(lease.get("age_ms")) / 1000),
            str(lease["pid"]) if "pid" in lease else "-",
            "yes" if lease.get("reclaimable") else "no",
        )
        for item in _objects(lease.get("items")):
            known = _mib(item.get("materialised_mib")) if item.get("source") != "unspecified" else "?"
            found.append((*head, _text(item.get("device")), _mib(item.get("size_mib")), known, *tail))
            head, tail = ("",) * len(head), ("",) * len(tail)
    return found


def reserves(state: Answer) -> Rows:
    """Return a line for each declared reserve."""
    return [
        (_text(each.get("name")), _text(each.get("device")), _mib(each.get("size_mib")))
        for each in _objects(state.get("reserves"))
    ]


def denials(state: Answer) -> Rows:
    """Return a line for each of the latest denials, newest first."""
    found: Rows = []
    for each in _objects(state.get("denials")):
        denied = each.get("denied")
        denied = denied if isinstance(denied, dict) else {}
        wanted = ", ".join(
            f"{_mib(item.get('size_mib'))} on {item.get('device', 'any')}" for item in _objects(each.get("items"))
        )
        ago = _time(_number(each.get("age_ms")) / 1000)
        reason, why = _text(denied.get("reason")), _text(denied.get("message"))
        found.append(
            (_text(each.get("tenant")), _text(each.get("purpose")), wanted, _text(each.get("tier")), ago, reason, why)
        )
    return found


TABLES: Final[tuple[tuple[tuple[str, ...], Callable[[Answer], Rows]], ...]] = (
    (DEVICES, devices),
    (LEASES, leases),
    (RESERVES, reserves),
    (DENIALS, denials),
)


def _rooms(device: Answer) -> Iterator[str]:
    by_tier = {_text(each.get("tier")): each.get("headroom_mib") for each in _objects(device.get("headroom"))}
    for tier in _TIERS:
        if tier in by_tier:
            yield str(_number(by_tier[tier]))


def _mib(value: object) -> str:
    return str(_number(value)) if value is not None else "unknown"


def _time(seconds: float) -> str:
    """Return a span in the units that tell it best: 4.2s, 3m10s, 2h05m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _objects(value: object) -> list[Answer]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else "-"


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
