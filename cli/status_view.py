"""What `omniserve status` shows of the answers of /status and /health. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

HEADER: Final = ("SERVICE", "STATE", "ADDRESS", "QUEUE", "SLOTS", "MODEL", "TOKENS")
OK: Final = "ok"

Answer = dict[str, Any]
Cells = tuple[str, str, str, str, str]  # the service with its part, queue, slots, model, tokens


def rows(url: str, health: Answer, status: Answer, addresses: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the lines of the table: the front door, then every service, a line for each of its pools or engines.

    `status` is empty when the caller may not see it; `addresses` says where services listen, as far as that is known.
    """
    found: list[tuple[str, ...]] = [("front door", "serving", url, "-", "-", "-", "-")]
    healths, details = _objects(health.get("services")), _objects(status.get("services"))
    for name in [*healths, *(name for name in details if name not in healths)]:
        detail = details.get(name, {})
        state = _state(healths.get(name, {}), detail)
        for label, *cells in _PARTS.get(name, _plain)(name, detail):
            found.append((label, state, addresses.get(name, "-"), *cells))
    return found


def trouble(health: Answer, status: Answer) -> str | None:
    """Return one line about what is not well, or None when everything is."""
    healths, details = _objects(health.get("services")), _objects(status.get("services"))
    complaints = [
        f"{name} is {_state(each, details.get(name, {}))}"
        for name, each in healths.items()
        if each.get("status") != "serving"
    ]
    complaints += [
        f"{name} does not tell its state"
        for name, each in details.items()
        if each.get("stale") and _serves(healths, name)
    ]
    complaints += [
        f"model {_text(engine.get('model'))} is {_engine_state(engine)}" for engine in _ailing_engines(details)
    ]
    verdicts = {answer.get("status") for answer in (health, status) if answer}
    if not complaints and verdicts <= {OK}:
        return None
    return f"degraded: {'; '.join(complaints) or 'the mesh says so'}; `make logs` and `omniserve doctor` tell more"


def _serves(healths: Mapping[str, Answer], name: str) -> bool:
    return healths.get(name, {}).get("status") == "serving"


def _ailing_engines(details: Mapping[str, Answer]) -> Iterator[Answer]:
    for engine in _list(details.get("llm", {}).get("engines")):
        if (
            engine.get("state") == "MODEL_STATE_FAILED"
            or engine.get("stuck")
            or _objects(engine).get("placement", {}).get("degraded")
        ):
            yield engine


def _state(health: Answer, detail: Answer) -> str:
    state = _text(health.get("status")).replace("_", " ")
    if detail.get("draining"):
        return "draining"
    if detail.get("stale"):
        age = detail.get("age_s")
        return f"{state}, numbers {age} s old" if age is not None else state
    return state


def _admission(name: str, detail: Answer) -> Iterator[Cells]:
    pools = _list(detail.get("pools"))
    for pool in pools:
        held = "".join(f", held: {_text(hold.get('reason'))}" for hold in _list(pool.get("holds")))
        slots = f"{_number(pool.get('in_use'))}/{_number(pool.get('slots'))}{held}"
        yield f"{name}/{_text(pool.get('name'))}", str(_number(pool.get("waiting"))), slots, "-", "-"
    if not pools:
        yield from _plain(name, detail)


def _llm(name: str, detail: Answer) -> Iterator[Cells]:
    engines = _list(detail.get("engines"))
    for engine in engines:
        slots = f"{_number(engine.get('active_sequences'))}/{_number(engine.get('slots'))}"
        read, written = _number(engine.get("prefill_tokens_total")), _number(engine.get("decode_tokens_total"))
        model = f"{_text(engine.get('model'))} ({_engine_state(engine)}{_placement(engine)})"
        yield name, str(_number(engine.get("waiting_requests"))), slots, model, f"{read} read, {written} written"
    if not engines:
        yield from _plain(name, detail)


def _engine_state(engine: Answer) -> str:
    state = _text(engine.get("state")).removeprefix("MODEL_STATE_").lower()
    placement = _objects(engine).get("placement", {})
    if engine.get("stuck"):
        return f"{state}, stuck"
    return f"{state}, degraded: {_text(placement.get('reason'))}" if placement.get("degraded") else state


def _placement(engine: Answer) -> str:
    device = _objects(engine).get("placement", {}).get("device")
    return f" on {device}" if device else ""


def _vram(name: str, detail: Answer) -> Iterator[Cells]:
    devices = _list(detail.get("devices"))
    waiting = str(_number(detail.get("waiting")))
    for device in devices:
        free = (
            f"{_number(device['free_mib'])} of {_number(device.get('total_mib'))} MiB free"
            if "free_mib" in device
            else "free memory unknown"
        )
        yield (
            f"{name}/{_text(device.get('device'))}",
            waiting,
            "-",
            f"{free}, {_number(device.get('granted_mib'))} leased",
            "-",
        )
    if not devices:
        yield from _plain(name, detail)


def _plain(name: str, _: Answer) -> Iterator[Cells]:
    yield name, "-", "-", "-", "-"


_PARTS: Final[Mapping[str, Callable[[str, Answer], Iterator[Cells]]]] = {
    "admission": _admission,
    "llm": _llm,
    "vram": _vram,
}


def _objects(value: object) -> dict[str, Answer]:
    """Return the entries that are objects themselves: what a newer mesh sends besides must not break the table."""
    return {name: each for name, each in value.items() if isinstance(each, dict)} if isinstance(value, dict) else {}


def _list(value: object) -> list[Answer]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else "unknown"


def _number(value: object) -> int:
    """Return a count, also one written as text, as protobuf's own JSON writes 64 bits."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else 0
    return value if isinstance(value, int) else 0
