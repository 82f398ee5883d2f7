"""Proto to values and back."""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from omniserve.admission.v1 import admission_pb2
from omniserve.relay.v1 import relay_pb2 as pb
from services.kit.config import Fault
from services.kit.errors import DomainError, Reason
from services.relay.core.addresses import AddressError, checked_path, parse_address
from services.relay.core.endpoints import Owned
from services.relay.core.model import Credential, Endpoint, Group, GroupKind, Upstream
from services.relay.core.planning import PlannedRoute, Target
from services.relay.core.stats import EdgeStats, EndpointCounts, UpstreamCounts
from services.relay.live import Change
from services.relay.reading import is_closed_header

KINDS: Final = {kind: pb.GroupKind.Value(f"GROUP_KIND_{kind.name}") for kind in GroupKind}
TARGETS: Final = {target: pb.RouteTarget.Value(f"ROUTE_TARGET_{target.name}") for target in Target}
_KINDS_BY_NUMBER: Final = {number: kind for kind, number in KINDS.items()}
_EXECUTION_TIERS: Final = ("local", "serverless", "pod")
_LONGEST: Final = 4096
_NONE: Final = UpstreamCounts()


# ---- asked ----------------------------------------------------------------------------------------------------------


def change(request: pb.SetEndpointsRequest, caller: str, default_ttl_s: int) -> Change:
    """Return what a service wants a group to have. Raises DomainError invalid_request naming the field."""
    kind = _KINDS_BY_NUMBER.get(request.group)
    if kind is None:
        raise _invalid("group must be stated", "group")
    if not request.owner or len(request.owner) > 128:
        raise _invalid("owner must be stated, in up to 128 characters", "owner")
    ttl_s = request.ttl_s if request.HasField("ttl_s") else default_ttl_s
    if not 1 <= ttl_s <= 86_400:
        raise _invalid(f"ttl_s is {ttl_s}; it goes from 1 to 86400 s", "ttl_s")
    return Change(
        owned=Owned(request.upstream, kind, f"{caller}/{request.owner}"),
        endpoints=tuple(_endpoint(each, f"endpoints[{index}]") for index, each in enumerate(request.endpoints)),
        credential=_credential(request.credential) if request.HasField("credential") else None,
        generation=request.generation,
        ttl_s=ttl_s,
    )


def _endpoint(asked: pb.Endpoint, field: str) -> Endpoint:
    weight = asked.weight if asked.HasField("weight") else 1
    if not 1 <= weight <= 128:
        raise _invalid(f"weight {weight} is not within 1 and 128", f"{field}.weight")
    if asked.execution_tier and asked.execution_tier not in _EXECUTION_TIERS:
        raise _invalid(f"execution_tier is none of {', '.join(_EXECUTION_TIERS)}", f"{field}.execution_tier")
    try:
        found = parse_address(asked.address)
    except AddressError as error:
        raise _invalid(f"{field}.address {error}", f"{field}.address") from error
    try:
        prefix = checked_path(asked.path_prefix).rstrip("/") if asked.HasField("path_prefix") else found.path_prefix
    except AddressError as error:
        raise _invalid(f"{field}.path_prefix: {error}", f"{field}.path_prefix") from error
    return replace(
        found,
        weight=weight,
        path_prefix=prefix,
        instance_id=asked.instance_id,
        execution_tier=asked.execution_tier,
    )


def _credential(asked: pb.Credential) -> Credential:
    """Return a credential that can stand in a header; messages never repeat it."""
    name = asked.header
    if not name.replace("-", "").isalnum() or not name.isascii() or len(name) > 64 or is_closed_header(name):
        raise _invalid("credential.header is no header that an upstream may want", "credential.header")
    value = asked.value
    if not value or not value.isascii() or not value.isprintable() or len(value) > _LONGEST:
        raise _invalid("credential.value must be printable ASCII on one line", "credential.value")
    return Credential(name.lower(), value)


def _invalid(message: str, field: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, message, field=field)


# ---- told -----------------------------------------------------------------------------------------------------------


def upstream(found: Upstream, counts: UpstreamCounts | None) -> pb.Upstream:
    """Return an upstream with those of its groups that have endpoints."""
    return pb.Upstream(
        name=found.name,
        modality=_modality(found.modality),
        groups=[
            _group(group, place, counts or _NONE) for place, group in enumerate(g for g in found.groups if g.endpoints)
        ],
        permits=found.permits or 0,
        timeout_ms=found.timeout_ms,
        idle_timeout_ms=found.idle_timeout_ms,
        max_body_mib=found.max_body_mib,
        model_label=found.model_label or None,
        prefer_embedded=found.prefer_embedded,
    )


def _group(group: Group, priority: int, counts: UpstreamCounts) -> pb.EndpointGroup:
    secure = any(each.scheme == "https" for each in group.endpoints)
    return pb.EndpointGroup(
        kind=KINDS[group.kind],
        priority=priority,
        endpoints=[_told_endpoint(each, group, counts) for each in group.endpoints],
        tiers=[tier(each) for each in sorted(group.tiers)],
        replay_statuses=sorted(group.replay_statuses),
        has_credential=group.credential is not None,
        trust=(group.ca or "system") if secure else "",
        min_free_mib=group.min_free_mib,
    )


def _told_endpoint(endpoint: Endpoint, group: Group, counts: UpstreamCounts) -> pb.Endpoint:
    found = counts.places.get((group.kind.value, place_of(endpoint)), EndpointCounts())
    return pb.Endpoint(
        address=endpoint.address,
        weight=endpoint.weight,
        origin=pb.ENDPOINT_ORIGIN_LIVE if endpoint.owner else pb.ENDPOINT_ORIGIN_SETTINGS,
        health=_health(endpoint, group, counts, found),
        instance_id=endpoint.instance_id or None,
        execution_tier=endpoint.execution_tier or None,
        path_prefix=endpoint.path_prefix or None,
        active_requests=found.active,
    )


def _health(
    endpoint: Endpoint, group: Group, counts: UpstreamCounts, found: EndpointCounts
) -> pb.EndpointHealth.ValueType:
    if endpoint.draining:
        return pb.ENDPOINT_HEALTH_DRAINING
    known, total = counts.members.get(group.kind.value, (0, 0))
    # Names are looked up by Envoy, which then counts by what it found: only all or none of them can be told apart.
    healthy = found.healthy
    if healthy is None and total:
        healthy = True if known == total else False if not known else None
    if healthy is None:
        return pb.ENDPOINT_HEALTH_UNSPECIFIED
    if healthy:
        return pb.ENDPOINT_HEALTH_HEALTHY
    return pb.ENDPOINT_HEALTH_EJECTED if counts.ejections else pb.ENDPOINT_HEALTH_UNHEALTHY


def place_of(endpoint: Endpoint) -> str:
    """Return an endpoint as Envoy's counters name it; nothing for one that Envoy looks up."""
    try:
        address = ipaddress.ip_address(endpoint.host)
    except ValueError:
        return ""
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{endpoint.port}".replace(":", "_")


def route(planned: PlannedRoute) -> pb.Route:
    """Return a route with what serves it."""
    spec, backing = planned.spec, planned.backing
    return pb.Route(
        route_id=spec.route_id,
        method=spec.method,
        path=spec.path,
        target=TARGETS[planned.target],
        upstream=None if backing is None else backing.upstream.name,
        upstream_path=planned.upstream_path or None,
        modality=_modality(spec.modality),
        forced_tier=tier(planned.forced_tier),
        paying_tiers=[tier(each) for each in sorted(planned.paying_tiers)],
        enabling_setting=spec.enabling_setting or None if planned.target is Target.DISABLED else None,
        added_headers=dict(planned.added_headers),
    )


def problem(fault: Fault) -> pb.Problem:
    """Return a fault of the settings."""
    return pb.Problem(file=fault.file, line=fault.line, setting=fault.setting, message=fault.message)


def upstream_status(name: str, counts: UpstreamCounts, saturated: int) -> pb.UpstreamStatus:
    """Return what Envoy counts for an upstream. `saturated`: requests that left because the device was taken."""
    return pb.UpstreamStatus(
        name=name,
        healthy_endpoints=counts.healthy,
        endpoints=counts.endpoints,
        requests_total=counts.requests,
        active_requests=counts.active,
        connections_total=counts.connections,
        active_connections=counts.active_connections,
        reused_total=counts.reused,
        connect_failures_total=counts.connect_failures,
        timeouts_total=counts.timeouts,
        responses_total=counts.responses,
        retries_total=counts.retries,
        ejections_total=counts.ejections,
        gates=[
            pb.GateGauge(
                cluster=cluster.text,
                epoch_slot=int(cluster.epoch.removeprefix("e")),
                active_requests=active,
                pending_requests=pending,
            )
            for cluster, (active, pending) in counts.gates.items()
        ],
        overflow_total=_overflow(counts, saturated),
    )


def _overflow(counts: UpstreamCounts, saturated: int) -> dict[str, int]:
    """Return requests that went elsewhere by cause; none for an upstream that has no local group to leave."""
    if "local" not in counts.members or "overflow" not in counts.members:
        return {}
    return {"saturated": saturated, "local_failed": max(0, counts.elsewhere - saturated)}


def statuses(
    upstreams: Mapping[str, Upstream], plan: Iterable[PlannedRoute], stats: EdgeStats
) -> Sequence[pb.UpstreamStatus]:
    """Return the counts of every upstream that has endpoints, by name."""
    saturated: dict[str, int] = {}
    for planned in plan:
        if planned.backing is not None:
            name = planned.backing.upstream.name
            saturated[name] = saturated.get(name, 0) + stats.saturated.get(planned.spec.route_id, 0)
    configured = sorted(name for name, each in upstreams.items() if any(group.endpoints for group in each.groups))
    return [upstream_status(name, stats.upstreams.get(name, _NONE), saturated.get(name, 0)) for name in configured]


def tier(name: str) -> admission_pb2.Tier.ValueType:
    """Return a tier by its word; unspecified for none."""
    return admission_pb2.Tier.Value(f"TIER_{name.upper()}") if name else admission_pb2.TIER_UNSPECIFIED


def tier_name(number: int) -> str:
    """Return a tier's word; "" for one that is not stated. Raises DomainError for a number that there is not."""
    if number not in admission_pb2.Tier.values():
        raise _invalid(f"tier {number} does not exist", "head.tier")
    name = admission_pb2.Tier.Name(admission_pb2.Tier.ValueType(number)).removeprefix("TIER_").lower()
    return "" if name == "unspecified" else name


def _modality(name: str) -> admission_pb2.Modality.ValueType:
    value = f"MODALITY_{name.upper() or 'UNSPECIFIED'}"
    return admission_pb2.Modality.Value(value)
