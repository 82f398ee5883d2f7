"""Clusters of the upstreams and their endpoints. Pure.

Groups of IP addresses get their endpoints in files of their own, so that one more or less touches no cluster; groups with
names are looked up by Envoy.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.relay.core.model import Endpoint, Group, GroupKind
from services.relay.core.planning import Backing, PlannedRoute
from services.relay.core.render_gate import EPOCHS, gated_cluster
from services.relay.core.render_nodes import FACTS, INTERNAL, WORKERS_NEVER_SEE, Node, Tree, header, literal, typed
from services.relay.core.render_proxied import cluster_of

_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_HTTPS_PORT: Final = 443
# What a service elsewhere has no business with.
_PRIVATE: Final = (INTERNAL, "x-forwarded-for", "cookie")
# Shorter than servers keep idle connections (uvicorn: 5 s), so that no request meets one being closed.
_IDLE_PLAIN: Final = "4s"
_IDLE_TLS: Final = "30s"


@dataclass(frozen=True, slots=True)
class Use:
    """One group of an upstream with the clusters that lead to it. `spare`: another group serves when this one cannot."""

    backing: Backing
    group: Group
    names: tuple[str, ...]
    spare: bool

    @property
    def gated(self) -> bool:
        """Return whether only the gate leads there."""
        return self.backing.gated and self.group is self.backing.main

    @property
    def endpoints_name(self) -> str:
        """Return the name of its endpoints, which the clusters of both epochs share."""
        return f"{self.backing.upstream.name}.{self.group.kind.value}"


def uses(plan: Iterable[PlannedRoute]) -> tuple[Use, ...]:
    """Return every group that some route leads to, once."""
    found: dict[str, Use] = {}
    for route in plan:
        backing = route.backing or route.elsewhere
        if backing is None:
            continue
        groups = (backing.main, *backing.fallbacks)
        for place, group in enumerate(groups):
            gated = backing.gated and place == 0
            names = tuple(gated_cluster(backing, epoch) for epoch in EPOCHS) if gated else (cluster_of(backing, group),)
            use = Use(backing, group, names, spare=place < len(groups) - 1)
            found.setdefault(use.endpoints_name, use)
    return tuple(found[name] for name in sorted(found))


def clusters(used: Sequence[Use], *, xds_dir: str, ca: str) -> list[Tree]:
    """Return the clusters. `xds_dir`: where Envoy finds endpoints; `ca`: the authorities that groups trust by default."""
    return [_cluster(use, name, xds_dir, ca) for use in used for name in use.names]


def endpoints(used: Sequence[Use]) -> dict[str, Tree]:
    """Return the endpoints that go into files, by their name."""
    return {use.endpoints_name: _assignment(use.endpoints_name, use.group) for use in used if _is_numeric(use.group)}


def endpoints_file(name: str) -> str:
    """Return the file of a group's endpoints."""
    return f"eds.{name}.yaml"


def _cluster(use: Use, name: str, xds_dir: str, ca: str) -> Tree:
    upstream, group = use.backing.upstream, use.group
    everywhere: Tree = {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}
    cluster: Tree = {
        "name": name,
        **_discovery(use, name, xds_dir),
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "1s" if group.kind is GroupKind.LOCAL else "3s",
        # The device is guarded by admission's queue, which answers with a reason; these limits must not answer first.
        "circuit_breakers": {"thresholds": [{**everywhere, "max_retries": 1000}]},
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_time": 30, "keepalive_interval": 10, "keepalive_probes": 3}
        },
        "typed_extension_protocol_options": {_HTTP_OPTIONS: _http_options(use)},
        "track_cluster_stats": {"per_endpoint_stats": True},
    }
    if use.spare:
        # With another group waiting, endpoints that fail their checks are not tried all the same.
        cluster["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
    if use.spare or len(group.endpoints) > 1:
        cluster["outlier_detection"] = _ejection(use)
    if upstream.health_path:
        cluster["health_checks"] = [_probe(upstream.health_path)]
        cluster["ignore_health_on_host_removal"] = True
    if any(each.scheme == "https" for each in group.endpoints):
        cluster["transport_socket"] = _tls(group, ca)
    return cluster


def _discovery(use: Use, name: str, xds_dir: str) -> Tree:
    if not _is_numeric(use.group):
        return {
            "type": "STRICT_DNS",
            "dns_lookup_family": "V4_PREFERRED",
            "load_assignment": _assignment(name, use.group),
        }
    source: Tree = {"path_config_source": {"path": f"{xds_dir}/{endpoints_file(use.endpoints_name)}"}}
    config: Tree = {"resource_api_version": "V3", **source}
    return {"type": "EDS", "eds_cluster_config": {"service_name": use.endpoints_name, "eds_config": config}}


def _ejection(use: Use) -> Tree:
    """Return when an endpoint is left alone for some seconds: it does not answer, or only says that it cannot."""
    return {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": 5,
        "consecutive_gateway_failure": 10,
        "enforcing_consecutive_gateway_failure": 100,
        "enforcing_consecutive_5xx": 0,  # a worker that fails one kind of request still serves the others
        "enforcing_success_rate": 0,
        "enforcing_local_origin_success_rate": 0,
        "interval": "1s",
        "base_ejection_time": "3s",
        "max_ejection_time": "30s",
        "max_ejection_percent": 100 if use.spare else 50,
    }


def _probe(path: str) -> Node:
    return {
        "timeout": "2s",
        "interval": "5s",
        "no_traffic_interval": "5s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "http_health_check": {"path": path},
    }


def _http_options(use: Use) -> Tree:
    secure = any(each.scheme == "https" for each in use.group.endpoints)
    common: Tree = {"idle_timeout": _IDLE_TLS if secure else _IDLE_PLAIN}
    if not use.backing.upstream.reuse_connections:
        common["max_requests_per_connection"] = 1
    options: Tree = {
        "explicit_http_config": {"http_protocol_options": {}},
        "common_http_protocol_options": common,
    }
    if filters := _filters(use):
        codec = typed("envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec")
        options["http_filters"] = [*filters, {"name": "envoy.filters.http.upstream_codec", "typed_config": codec}]
    return typed(_HTTP_OPTIONS, **options)


def _filters(use: Use) -> list[Node]:
    """Return what happens to a request on its way to this group and to no other."""
    found: list[Node] = []
    if mutations := _mutations(use):
        changed = typed(
            "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            mutations={"request_mutations": mutations},
        )
        found.append({"name": "envoy.filters.http.header_mutation", "typed_config": changed})
    (prefix, *_) = sorted({each.path_prefix for each in use.group.endpoints})
    if prefix:
        # Routes can rewrite a path, but only once for all groups that they lead to.
        code = (
            f"function envoy_on_request(h) h:headers():replace(':path', [[{prefix}]] .. h:headers():get(':path')) end"
        )
        script = typed("envoy.extensions.filters.http.lua.v3.Lua", default_source_code={"inline_string": code})
        found.append({"name": "envoy.filters.http.lua", "typed_config": script})
    return found


def _mutations(use: Use) -> list[Node]:
    """Return changes of headers: what the mesh says to itself ends here, what the group wants from us begins.

    Behind the gate the former has ended already.
    """
    found: list[Node] = []
    if not use.gated:
        found += [{"remove": name} for name in WORKERS_NEVER_SEE]
    if use.group.kind is not GroupKind.LOCAL:
        found += [{"remove": name} for name in _PRIVATE]
    if use.group.credential is not None:
        found.append({"append": header(use.group.credential.header, literal(use.group.credential.value))})
    return found


def _assignment(name: str, group: Group) -> Tree:
    entries: list[Node] = [_lb_endpoint(each, group) for each in group.endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": entries}]}


def _lb_endpoint(endpoint: Endpoint, group: Group) -> Node:
    authority = _authority(endpoint, group)
    facts: Tree = {"backend": "local" if group.kind is GroupKind.LOCAL else "managed"}
    if endpoint.execution_tier:
        facts["execution_tier"] = endpoint.execution_tier
    return {
        "endpoint": {
            "address": {"socket_address": {"address": endpoint.host, "port_value": endpoint.port}},
            "hostname": authority,
            "health_check_config": {"hostname": authority},
        },
        "load_balancing_weight": endpoint.weight,
        "health_status": "DRAINING" if endpoint.draining else "UNKNOWN",
        "metadata": {"filter_metadata": {FACTS: facts}},
    }


def _authority(endpoint: Endpoint, group: Group) -> str:
    """Return what requests name as Host. It is also the TLS name where a group has several, and that has no port."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    default = _HTTPS_PORT if endpoint.scheme == "https" else 80
    several = endpoint.scheme == "https" and len({each.host for each in group.endpoints}) > 1
    return host if several or endpoint.port == default else f"{host}:{endpoint.port}"


def _tls(group: Group, ca: str) -> Tree:
    """Return TLS with the endpoint's own name asked for and checked against the authorities that are trusted."""
    hosts = {each.host for each in group.endpoints}
    validation: Tree = {"trusted_ca": {"filename": group.ca or ca}}
    names: Tree = {"auto_host_sni": True, "auto_sni_san_validation": True}
    if len(hosts) == 1:
        (host,) = hosts
        kind = "IP_ADDRESS" if _is_ip(host) else "DNS"
        names = {} if _is_ip(host) else {"sni": host}
        validation["match_typed_subject_alt_names"] = [{"san_type": kind, "matcher": {"exact": host}}]
    context = typed(
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "validation_context": validation,
        },
        **names,
    )
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _is_numeric(group: Group) -> bool:
    return all(_is_ip(each.host) for each in group.endpoints)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
