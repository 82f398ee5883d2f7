"""Endpoints that services set while running, and endpoints taken out of use: kept beside the settings' own. Pure.

An owner replaces what it contributes to a group as a whole, numbered by a generation that only grows; without news its
contribution ends. Time is an argument, in seconds of any one clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from services.kit.errors import DomainError, Reason
from services.relay.core.model import Credential, Endpoint, Group, GroupKind, Upstream

MOST_ENDPOINTS: Final = 256
MOST_OWNERS: Final = 64
"""Of one group: a wrong caller must not make the configuration grow without end."""


class Owned(NamedTuple):
    """What an owner contributes to: one group of one upstream."""

    upstream: str
    kind: GroupKind
    owner: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """An owner's endpoints. `credential` None: the group's own. Empty ones stay, to remember the generation."""

    endpoints: tuple[Endpoint, ...]
    credential: Credential | None
    generation: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class Live:
    """Everything that is not in the settings. `drained`: upstream and address of endpoints out of use."""

    contributions: Mapping[Owned, Contribution] = field(default_factory=lambda: MappingProxyType({}))
    drained: frozenset[tuple[str, str]] = frozenset()


def with_contribution(
    live: Live, owned: Owned, contribution: Contribution, upstreams: Mapping[str, Upstream], now: float
) -> Live:
    """Return the state with an owner's endpoints replaced.

    Raises DomainError: not_found (upstream or group), conflict (an older generation), invalid_request (too many
    endpoints, or some that cannot stand beside those that the group has).
    """
    group = _group(upstreams, owned.upstream, owned.kind)
    before = live.contributions.get(owned)
    if before is not None and contribution.generation < before.generation:
        message = f"generation {contribution.generation} is older than {before.generation}, which {owned.owner} set"
        raise DomainError(Reason.CONFLICT, message, field="generation")
    live = without_ended(live, now)
    owners = [each for each in live.contributions if each[:2] == owned[:2] and each != owned]
    if len(contribution.endpoints) > MOST_ENDPOINTS or len(owners) >= MOST_OWNERS:
        message = f"a group takes {MOST_ENDPOINTS} endpoints of an owner and {MOST_OWNERS} owners"
        raise DomainError(Reason.INVALID_REQUEST, message, field="endpoints")
    if len({each.address for each in contribution.endpoints}) < len(contribution.endpoints):
        raise DomainError(Reason.INVALID_REQUEST, "an endpoint is named twice", field="endpoints")
    others = {key: each for key, each in live.contributions.items() if key != owned}
    _refuse_strangers(group, [each for key, each in others.items() if key[:2] == owned[:2]], contribution)
    return replace(live, contributions=MappingProxyType({**others, owned: contribution}))


def without_ended(live: Live, now: float) -> Live:
    """Return the state without the endpoints whose time is over; the same object when there are none."""
    ended = [key for key, each in live.contributions.items() if each.endpoints and each.ends_at <= now]
    if not ended:
        return live
    kept = {key: replace(each, endpoints=()) if key in ended else each for key, each in live.contributions.items()}
    return replace(live, contributions=MappingProxyType(kept))


def next_end(live: Live) -> float | None:
    """Return when the next endpoints end, None when there are none."""
    return min((each.ends_at for each in live.contributions.values() if each.endpoints), default=None)


def with_drained(live: Live, upstreams: Mapping[str, Upstream], name: str, address: str, *, drained: bool) -> Live:
    """Return the state with one endpoint out of use, or back in it. Raises DomainError not_found."""
    upstream = upstreams.get(name)
    if upstream is None:
        raise DomainError(Reason.NOT_FOUND, f"there is no upstream {name!r}", field="upstream")
    known = {each.address for group in merged(upstream, live).groups for each in group.endpoints}
    if address not in known:
        message = f"{name} has no endpoint {address}; it has {', '.join(sorted(known)) or 'none'}"
        raise DomainError(Reason.NOT_FOUND, message, field="address")
    entry = frozenset({(name, address)})
    return replace(live, drained=live.drained | entry if drained else live.drained - entry)


def merged(upstream: Upstream, live: Live) -> Upstream:
    """Return an upstream with what is live in its groups, and what is out of use marked.

    What cannot stand beside the settings' endpoints (they may have changed since) is left out: a credential never goes
    to an endpoint that it was not given for.
    """
    contributions = sorted((key, each) for key, each in live.contributions.items() if key.upstream == upstream.name)
    groups = tuple(
        _merged_group(group, [(key.owner, each) for key, each in contributions if key.kind is group.kind])
        for group in upstream.groups
    )
    drained = {address for name, address in live.drained if name == upstream.name}
    return replace(upstream, groups=tuple(_marked(group, drained) for group in groups))


def _merged_group(group: Group, contributions: Iterable[tuple[str, Contribution]]) -> Group:
    found = group
    for owner, each in contributions:
        wanted = each.credential or group.credential
        if each.endpoints and _fits(found, each, wanted):
            known = {endpoint.address for endpoint in found.endpoints}
            added = (replace(new, owner=owner) for new in each.endpoints if new.address not in known)
            found = replace(found, endpoints=(*found.endpoints, *added), credential=wanted)
    return found


def _fits(group: Group, contribution: Contribution, wanted: Credential | None) -> bool:
    """Return whether endpoints can be in one cluster with those of a group: the same scheme, prefix and credential."""
    if not group.endpoints:
        return True
    kinds = {(each.scheme, each.path_prefix) for each in (*group.endpoints, *contribution.endpoints)}
    return len(kinds) == 1 and wanted == group.credential


def _refuse_strangers(group: Group, others: Iterable[Contribution], contribution: Contribution) -> None:
    if len({(each.scheme, each.path_prefix) for each in contribution.endpoints}) > 1:
        message = "endpoints of one group must share the scheme and the path"
        raise DomainError(Reason.INVALID_REQUEST, message, field="endpoints")
    present = _merged_group(group, [("", each) for each in others])
    if contribution.endpoints and not _fits(present, contribution, contribution.credential or group.credential):
        message = "the group has endpoints of another scheme or path, or ones that want another credential"
        raise DomainError(Reason.INVALID_REQUEST, message, field="endpoints")


def _marked(group: Group, drained: set[str]) -> Group:
    if not any(each.address in drained for each in group.endpoints):
        return group
    marked = (replace(each, draining=True) if each.address in drained else each for each in group.endpoints)
    return replace(group, endpoints=tuple(marked))


def _group(upstreams: Mapping[str, Upstream], name: str, kind: GroupKind) -> Group:
    upstream = upstreams.get(name)
    if upstream is None:
        message = f"there is no upstream {name!r}; there are {', '.join(sorted(upstreams))}"
        raise DomainError(Reason.NOT_FOUND, message, field="upstream")
    found = next((group for group in upstream.groups if group.kind is kind), None)
    if found is None:
        kinds = ", ".join(group.kind.value for group in upstream.groups)
        raise DomainError(Reason.NOT_FOUND, f"{name} has no {kind.value} group; it has {kinds}", field="group")
    return found


def pass_over(upstream: Upstream, free_mib: int | None, *, passed_before: bool) -> bool:
    """Return whether the local group is left alone for want of device memory.

    Only where another group serves every tier in its stead; unknown memory is no reason. Once passed over it comes back
    with an eighth more than it needs, so that the edge of it does not make the configuration flutter.
    """
    local, overflow = upstream.group(GroupKind.LOCAL), upstream.group(GroupKind.OVERFLOW)
    if local is None or overflow is None or overflow.tiers or not local.min_free_mib or free_mib is None:
        return False
    return free_mib < local.min_free_mib * (9 if passed_before else 8) // 8


def without_local(upstream: Upstream) -> Upstream:
    """Return the upstream with its local group empty."""
    empty = (replace(g, endpoints=()) if g.kind is GroupKind.LOCAL else g for g in upstream.groups)
    return replace(upstream, groups=tuple(empty))
