"""What the gate in front of local workers asks for, and what it answers to whom it does not let in. Pure.

The outer route says in `x-omniserve-ask` what a request costs:
`route=<id>;upstream=<name>;modality=<m>[;units=N][;tier=<forced>][;try][;paying=paid+sub]`. It is the same text for every request
of the route, so it is read once.
"""

import json
import math
from typing import Final, NamedTuple

from services.admission.core.intake import Intake, InvalidAskError, Wish
from services.admission.core.model import Ask, Modality, Refusal, Rejected, Tier
from services.kit.errors import Reason

DEFAULT_TIER: Final = Tier.FREE
SOON_S: Final = 1
"""When to come back if nobody knows better."""

_TIERS: Final = {tier.name.lower(): tier for tier in Tier}
_MODALITIES: Final = {one.name.lower(): one for one in Modality}
_OF_REFUSAL: Final = {
    Refusal.QUEUE_FULL: (429, "rate_limit_error"),
    Refusal.ADMISSION_TIMEOUT: (429, "rate_limit_error"),
    Refusal.SATURATED: (503, "server_error"),
    Refusal.DRAINING: (503, "server_error"),
    Refusal.NO_CAPACITY: (503, "server_error"),
    Refusal.INVALID_REQUEST: (500, "server_error"),  # the settings' fault, not the caller's
}
# What another device may serve at once: a route with one goes on to it.
_ELSEWHERE: Final = frozenset({Refusal.SATURATED, Refusal.NO_CAPACITY})


class Requirement(NamedTuple):
    """What a route asks for. `units` None is the modality's default; `paying` empty lets every tier in."""

    route: str
    upstream: str
    modality: Modality
    units: int | None = None
    forced: Tier | None = None
    may_wait: bool = True
    paying: frozenset[Tier] = frozenset()


class Admissible(NamedTuple):
    """A request that may ask for a permit. `upstream`: whose worker it goes to."""

    ask: Ask
    upstream: str


class Answer(NamedTuple):
    """What a caller gets instead of the worker's answer. `retry_after_s`: whole seconds, None where it would not help."""

    status: int
    reason: str
    type: str
    message: str
    retry_after_s: int | None = None
    is_saturated: bool = False


class BadRouteError(ValueError):
    """A route asks for what cannot be had: the edge's configuration is wrong, not the caller."""


def parse(text: str) -> Requirement:
    """Return what a route's ask says; words that we do not know are for newer versions. Raises BadRouteError."""
    said: dict[str, str] = {}
    for part in text.split(";"):
        name, _, value = part.strip().partition("=")
        said[name] = value
    modality = _MODALITIES.get(said.get("modality", ""))
    if modality is None:
        raise BadRouteError(f"the route's ask names no modality: {text!r}")
    units = said.get("units")
    if units is not None and not units.isdecimal():
        raise BadRouteError(f"the route's ask has units that are no number: {text!r}")
    return Requirement(
        route=said.get("route", ""),
        upstream=said.get("upstream", ""),
        modality=modality,
        units=None if units is None else int(units),
        forced=_tier(said["tier"], text) if said.get("tier") else None,
        may_wait="try" not in said,
        paying=frozenset(_tier(one, text) for one in said.get("paying", "").split("+") if one),
    )


def _tier(word: str, text: str) -> Tier:
    try:
        return _TIERS[word]
    except KeyError:
        raise BadRouteError(f"the route's ask has the unknown tier {word!r}: {text!r}") from None


def receive(ask: str, tier: str, client: str, intake: Intake) -> Admissible | Answer:
    """Decide about a request by its three headers; an empty tier is the default one."""
    try:
        wanted = parse(ask)
        word = tier.strip().lower()
        asked = _TIERS.get(word) if word else DEFAULT_TIER
        if asked is None:
            message = f"tier {tier[:40]!r} is none of {', '.join(reversed(_TIERS))}"
            return Answer(400, Reason.INVALID_REQUEST, "invalid_request_error", message)
        if wanted.paying and asked not in wanted.paying:
            return payment_required(wanted, asked)
        wish = Wish(
            modality=wanted.modality,
            tier=asked if wanted.forced is None else wanted.forced,
            units=_at_most(wanted, intake),
            may_wait=wanted.may_wait,
            principal=client,
        )
        return Admissible(intake.resolve(wish), wanted.upstream or wanted.modality.name.lower())
    except (BadRouteError, InvalidAskError) as error:
        return not_understood(str(error))


def not_understood(why: str) -> Answer:
    """Return the answer when the edge asks for what cannot be had."""
    return Answer(500, Reason.INTERNAL, "server_error", f"the gate is misconfigured: {why}")


def _at_most(wanted: Requirement, intake: Intake) -> int | None:
    """Return the units asked for, at most the whole pool: `units=16` means everything where there are fewer."""
    if wanted.units is None:
        return None
    return min(wanted.units, intake.slots[intake.pool_of[wanted.modality]])


def payment_required(wanted: Requirement, tier: Tier) -> Answer:
    """Return the refusal of a tier that the route is not for."""
    names = " or ".join(one.name.lower() for one in sorted(wanted.paying, reverse=True))
    message = f"this route is for the tier {names}; the request's is {tier.name.lower()}"
    return Answer(402, Reason.PAYMENT_REQUIRED, "permission_error", message)


def refused(event: Rejected) -> Answer:
    """Return what a caller hears of a refusal."""
    status, kind = _OF_REFUSAL[event.refusal]
    wait_s = SOON_S if event.retry_after_s is None else max(SOON_S, math.ceil(event.retry_after_s))
    return Answer(status, event.refusal.value, kind, event.message, wait_s, event.refusal in _ELSEWHERE)


def body(answer: Answer, request_id: str) -> bytes:
    """Return the answer in OpenAI's error shape."""
    error: dict[str, str | int | None] = {
        "message": f"{answer.message[:1].upper()}{answer.message[1:]}.",
        "type": answer.type,
        "param": None,
        "code": str(answer.reason),
        "reason": str(answer.reason),
        "request_id": request_id,
    }
    if answer.retry_after_s is not None:
        error["retry_after_ms"] = answer.retry_after_s * 1000
    return json.dumps({"error": error}).encode()
