"""What serves each route: a service of the mesh, an upstream through Envoy, or nothing. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from services.relay.core.model import TIERS, Group, GroupKind, RelayInputs, RouteOverride, RouteSpec, Upstream
from services.relay.core.routes import ALTERNATIVES, ROUTES, UNIFIED

DEFAULT_TIER: Final = "free"
"""Of callers who ask for none."""
_AS_IT_IS: Final = RouteOverride()


class Target(Enum):
    """What serves a route; see the contract."""

    EMBEDDED = "embedded"
    PROXIED = "proxied"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Backing:
    """The upstream behind a proxied route. `main` is tried first, then `fallbacks` in order.

    `gated`: attempts on `main` take a permit of the local device first. `units`: slots it takes; None is the modality's
    default. The fallbacks are elsewhere and take none.
    """

    upstream: Upstream
    main: Group
    fallbacks: tuple[Group, ...] = ()
    gated: bool = False
    units: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """A route with what serves it and on whose terms. `backing` only when it is proxied.

    `elsewhere`: where requests of an embedded route go that the mesh's own service cannot take now, if they may.
    `upstream_path`: "" leaves the path as it came. `timeout_ms`: longest answer; None for none.
    """

    spec: RouteSpec
    target: Target
    backing: Backing | None = None
    elsewhere: Backing | None = None
    upstream_path: str = ""
    forced_tier: str = ""
    paying_tiers: frozenset[str] = frozenset()
    timeout_ms: int | None = None
    added_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def proxied(self) -> Backing:
        """Return the upstream behind it. Raises ValueError when it is not proxied."""
        if self.backing is None:
            raise ValueError(f"route {self.spec.route_id} is not proxied")
        return self.backing


@dataclass(frozen=True, slots=True)
class TierRule:
    """What a proxied route does for some tiers: refuse them (402), or serve them with these fallbacks."""

    tiers: tuple[str, ...]
    refused: bool
    fallbacks: tuple[Group, ...] = ()


def plan(inputs: RelayInputs, routes: Sequence[RouteSpec] = ROUTES) -> tuple[PlannedRoute, ...]:
    """Return every route with what serves it.

    An upstream that is configured for a route wins over the service of the mesh, unless it says otherwise; the unified
    one serves only what nobody else does.
    """
    return tuple(_planned(spec, inputs) for spec in routes)


def _planned(spec: RouteSpec, inputs: RelayInputs) -> PlannedRoute:
    backing = _backing(spec, inputs.upstreams)
    if backing is None:
        if not spec.embedded:
            return PlannedRoute(spec, Target.DISABLED)
        return PlannedRoute(spec, Target.EMBEDDED, elsewhere=_elsewhere(spec, inputs.upstreams))
    override = inputs.overrides.get(spec.route_id, _AS_IT_IS)
    own_path = inputs.paths.get(spec.path_setting) or spec.upstream_path
    forced = spec.forced_tier if override.forced_tier is None else override.forced_tier
    return PlannedRoute(
        spec=spec,
        target=Target.PROXIED,
        backing=backing,
        upstream_path=own_path if override.upstream_path is None else override.upstream_path,
        forced_tier=forced,
        paying_tiers=_paying(spec, override, backing.main),
        timeout_ms=backing.upstream.timeout_ms if override.timeout_ms is None else override.timeout_ms,
        added_headers={**spec.added_headers, **override.added_headers},
    )


def _paying(spec: RouteSpec, override: RouteOverride, main: Group) -> frozenset[str]:
    if override.paying_tiers is not None:
        return override.paying_tiers
    # Behind a managed or remote group there is no queue to wait in: who may not use it has to pay for it.
    return spec.paying_tiers or (frozenset() if main.kind is GroupKind.LOCAL else main.tiers)


def _backing(spec: RouteSpec, upstreams: Mapping[str, Upstream]) -> Backing | None:
    """Return the upstream that serves a route instead of the mesh's own service, or None."""
    if not spec.upstream:
        return None
    for name in (spec.upstream, *ALTERNATIVES.get(spec.upstream, (UNIFIED,))):
        upstream = upstreams.get(name)
        found = None if upstream is None else _order(upstream)
        if upstream is None or found is None:
            continue
        if spec.embedded and (upstream.prefer_embedded or name != spec.upstream or found[0].kind is GroupKind.OVERFLOW):
            return None
        main, *fallbacks = found
        return Backing(upstream, main, tuple(fallbacks), gated=_is_gated(upstream, main), units=upstream.permits)
    return None


def _elsewhere(spec: RouteSpec, upstreams: Mapping[str, Upstream]) -> Backing | None:
    """Return the remote group that helps out the mesh's own service, or None."""
    upstream = upstreams.get(spec.upstream) if spec.spills else None
    group = None if upstream is None else upstream.group(GroupKind.OVERFLOW)
    return None if upstream is None or group is None else Backing(upstream, group)


def _order(upstream: Upstream) -> tuple[Group, ...] | None:
    """Return the groups that can serve, in the order in which they are tried; None without any."""
    found = [upstream.group(kind) for kind in (GroupKind.LOCAL, GroupKind.OVERFLOW, GroupKind.MANAGED)]
    return tuple(group for group in found if group is not None) or None


def _is_gated(upstream: Upstream, main: Group) -> bool:
    if main.kind is GroupKind.LOCAL:
        return upstream.permits != 0
    return main.kind is GroupKind.MANAGED and bool(upstream.permits)


def tier_rules(route: PlannedRoute) -> tuple[TierRule, ...]:
    """Return what a proxied route does for whom. The last rule has the default tier and serves who asks for no known one."""
    tiers_of: dict[tuple[bool, tuple[Group, ...]], list[str]] = {}
    for tier in TIERS:
        refused = bool(route.paying_tiers) and tier not in route.paying_tiers
        fallbacks = () if refused else _eligible(route.proxied.fallbacks, route.forced_tier or tier)
        tiers_of.setdefault((refused, fallbacks), []).append(tier)
    rules = [TierRule(tuple(tiers), refused, fallbacks) for (refused, fallbacks), tiers in tiers_of.items()]
    return tuple(sorted(rules, key=lambda rule: DEFAULT_TIER in rule.tiers))


def _eligible(groups: Iterable[Group], tier: str) -> tuple[Group, ...]:
    return tuple(group for group in groups if not group.tiers or tier in group.tiers)
