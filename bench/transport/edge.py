"""Envoy's configuration for a gate in front of workers, as small as it can be: for the bench and for the tests of the gate.

Two doors to the same workers: `public` asks admission for every request, `plain` asks nobody. The gate itself is written as
the product has it: an internal listener of the same Envoy with ext_proc in front of the local clusters, two per upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_PATIENCE = "3600s"
_WIDE_OPEN = {"thresholds": [{"max_connections": 100000, "max_pending_requests": 100000, "max_requests": 100000}]}
_OVERWRITE = "OVERWRITE_IF_EXISTS_OR_ADD"
_OURS = ("x-omniserve-ask", "x-omniserve-route", "x-omniserve-admitted", "x-omniserve-tier", "x-omniserve-client")

TOKEN_VARIABLE = "OMNISERVE_EDGE_TOKEN"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True)
class Ports:
    """Where Envoy listens."""

    public: int
    plain: int
    operator: int
    admin: int


@dataclass(frozen=True, slots=True)
class Route:
    """A gated route: requests with this path prefix, the upstream that serves them, and what is asked of admission."""

    prefix: str
    upstream: str
    ask: str
    remote: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def configuration(
    ports: Ports, *, admission: str, workers: Mapping[str, int], routes: tuple[Route, ...], access_log: str = ""
) -> dict[str, Any]:
    """Return Envoy's configuration. `admission`: host:port; `workers`: ports by upstream name."""
    clusters = [_local(name, port, side) for name, port in workers.items() for side in (".local.e0", ".local.e1", "")]
    return {
        "node": {"id": "edge", "cluster": "omniserve"},
        "admin": {"address": _address(ports.admin)},
        "bootstrap_extensions": [
            _typed("envoy.bootstrap.internal_listener", "bootstrap.internal_listener.v3.InternalListener")
        ],
        "static_resources": {
            "listeners": [
                _public(ports.public, routes, access_log),
                _gate(routes),
                _listener("operator", ports.operator, _manager("operator", [_STATS])),
                _listener("plain", ports.plain, _manager("plain", [_plain_route(each) for each in routes])),
            ],
            "clusters": [
                _gate_cluster(),
                _admission_cluster(admission),
                _local("envoy_admin", ports.admin, ""),
                *clusters,
            ],
        },
    }


def answering(port: int, admin: int) -> dict[str, Any]:
    """Return the configuration of an Envoy that answers every request itself: a worker that costs next to nothing."""
    answer = {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": '{"ok": true}'}}}
    listener = _listener("worker", port, _manager("worker", [answer]))
    return {"admin": {"address": _address(admin)}, "static_resources": {"listeners": [listener]}}


# ---- listeners ----------------------------------------------------------------------------------------------------


def _public(port: int, routes: tuple[Route, ...], access_log: str) -> dict[str, Any]:
    manager = _manager("public", [_outer_route(each) for each in routes])
    manager["early_header_mutation_extensions"] = [
        _typed(
            "envoy.http.early_header_mutation.header_mutation",
            "http.early_header_mutation.header_mutation.v3.HeaderMutation",
            mutations=[
                {"remove": "x-om-asked-tier"},
                {"append": _set("x-om-asked-tier", "%REQ(x-omniserve-tier)%")},
                {"remove_on_match": {"key_matcher": {"prefix": "x-omniserve-", "ignore_case": True}}},
                {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-", "ignore_case": True}}},
                {"append": _set("x-omniserve-tier", "%REQ(x-om-asked-tier)%")},
                {"remove": "x-om-asked-tier"},
                {"remove": "x-request-id"},
            ],
        )
    ]
    manager["use_remote_address"] = True
    manager["generate_request_id"] = True
    manager["always_set_request_id_in_response"] = True
    if access_log:
        manager["access_log"] = [
            _typed(
                "envoy.access_loggers.file",
                "access_loggers.file.v3.FileAccessLog",
                path=access_log,
                log_format={"json_format": {"path": "%PATH(NQ:ORIG_OR_PATH)%", "status": "%RESPONSE_CODE%"}},
            )
        ]
    return _listener("public", port, manager)


def _outer_route(route: Route) -> dict[str, Any]:
    added = {
        "x-omniserve-ask": route.ask,
        "x-omniserve-route": route.upstream,
        "x-omniserve-client": "anonymous",
        **route.headers,
    }
    goes: dict[str, Any] = {"timeout": "0s", "idle_timeout": _PATIENCE}
    if route.remote:
        goes["inline_cluster_specifier_plugin"] = {
            "extension": _typed(
                "envoy.router.cluster_specifier_plugin.priority_group",
                "router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier",
                priority_groups=[
                    {"name": "local", "clusters": [{"cluster_name": "gate", "weight": 1}]},
                    {"name": "remote", "clusters": [{"cluster_name": route.remote, "weight": 1}]},
                ],
            )
        }
        goes["retry_policy"] = {
            "retry_on": "connect-failure,refused-stream,reset,retriable-headers",
            "retriable_headers": [{"name": "x-omniserve-overflow", "present_match": True}],
            "num_retries": 1,
            "refresh_cluster_on_retry": True,
            "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.002s"},
        }
    else:
        goes["cluster"] = "gate"
    return {
        "match": {"prefix": route.prefix},
        "request_headers_to_add": [_set(name, value) for name, value in added.items()],
        "request_headers_to_remove": ["authorization", "x-api-key"],
        "response_headers_to_remove": ["x-omniserve-overflow"],
        "route": goes,
    }


def _gate(routes: tuple[Route, ...]) -> dict[str, Any]:
    upstreams = dict.fromkeys(each.upstream for each in routes)
    choices = [_admitted(name, side) for name in upstreams for side in ("e0", "e1")]
    manager = _manager("gate", [*choices, _UNADMITTED])
    # Told by the outer connection manager; a second answer would count twice.
    manager["generate_request_id"] = False
    manager["preserve_external_request_id"] = True
    manager["http_filters"].insert(
        0,
        _typed(
            "envoy.filters.http.ext_proc",
            "filters.http.ext_proc.v3.ExternalProcessor",
            grpc_service={
                "envoy_grpc": {"cluster_name": "admission"},
                "initial_metadata": [{"key": "x-omniserve-service-token", "value": f"%ENVIRONMENT({TOKEN_VARIABLE})%"}],
            },
            # What runs outlives admission; what is not admitted meets the last route below.
            failure_mode_allow=True,
            message_timeout=_PATIENCE,
            # Open until the exchange is over, and no byte of a body passes.
            processing_mode={
                "request_header_mode": "SEND",
                "response_header_mode": "SKIP",
                "response_trailer_mode": "SEND",
            },
            # Admission sees what it decides by and nothing else: no credentials, and the same bytes for the same ask.
            forward_rules={
                "allowed_headers": {
                    "patterns": [
                        {"exact": name}
                        for name in ("x-omniserve-ask", "x-omniserve-tier", "x-omniserve-client", "x-request-id")
                    ]
                }
            },
        ),
    )
    return {"name": "gate", "internal_listener": {}, "filter_chains": [_chain(manager)]}


def _admitted(upstream: str, side: str) -> dict[str, Any]:
    return {
        "match": {
            "prefix": "/",
            "headers": [
                {"name": "x-omniserve-admitted", "string_match": {"exact": side}},
                {"name": "x-omniserve-route", "string_match": {"exact": upstream}},
            ],
        },
        "request_headers_to_remove": list(_OURS),
        "response_headers_to_remove": ["x-omniserve-overflow"],
        "route": {"cluster": f"{upstream}.local.{side}", "timeout": "0s", "idle_timeout": _PATIENCE},
    }


_UNADMITTED = {
    "match": {"prefix": "/"},
    "direct_response": {
        "status": 503,
        "body": {
            "inline_string": '{"error":{"message":"admission does not answer; it may be restarting","type":"server_error",'
            '"param":null,"code":"admission_unavailable","reason":"admission_unavailable","retry_after_ms":1000}}'
        },
    },
    "response_headers_to_add": [
        {"header": {"key": "content-type", "value": "application/json"}, "append_action": _OVERWRITE},
        {"header": {"key": "retry-after", "value": "1"}, "append_action": _OVERWRITE},
    ],
}


_STATS = {"match": {"prefix": "/admin/envoy/"}, "route": {"cluster": "envoy_admin", "prefix_rewrite": "/"}}


def _plain_route(route: Route) -> dict[str, Any]:
    goes = {"cluster": route.upstream, "timeout": "0s", "idle_timeout": _PATIENCE}
    return {"match": {"prefix": route.prefix}, "route": goes}


def _manager(name: str, routes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "stream_idle_timeout": _PATIENCE,
        "route_config": {
            "name": name,
            "virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}],
        },
        "http_filters": [
            _typed("envoy.filters.http.router", "filters.http.router.v3.Router", suppress_envoy_headers=True)
        ],
    }


def _listener(name: str, port: int, manager: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "address": _address(port), "filter_chains": [_chain(manager)]}


def _chain(manager: dict[str, Any]) -> dict[str, Any]:
    return {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}


# ---- clusters -----------------------------------------------------------------------------------------------------


def _gate_cluster() -> dict[str, Any]:
    where = {"envoy_internal_address": {"server_listener_name": "gate"}}
    return {
        "name": "gate",
        "connect_timeout": "1s",
        "circuit_breakers": _WIDE_OPEN,
        "load_assignment": _assignment("gate", where),
        "transport_socket": _typed(
            "envoy.transport_sockets.internal_upstream",
            "transport_sockets.internal_upstream.v3.InternalUpstreamTransport",
            transport_socket=_typed("envoy.transport_sockets.raw_buffer", "transport_sockets.raw_buffer.v3.RawBuffer"),
        ),
    }


def _admission_cluster(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {
        "name": "admission",
        "connect_timeout": "1s",
        "circuit_breakers": _WIDE_OPEN,
        "load_assignment": _assignment("admission", _address(int(port), host)),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {
                    "http2_protocol_options": {
                        "max_concurrent_streams": 100000,
                        "connection_keepalive": {"interval": "2s", "timeout": "5s"},
                    }
                },
            }
        },
    }


def _local(name: str, port: int, side: str) -> dict[str, Any]:
    return {
        "name": f"{name}{side}",
        "connect_timeout": "1s",
        "circuit_breakers": _WIDE_OPEN,
        "load_assignment": _assignment(f"{name}{side}", _address(port)),
    }


def _assignment(name: str, address: dict[str, Any]) -> dict[str, Any]:
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}


def _address(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _set(name: str, value: str) -> dict[str, Any]:
    return {"header": {"key": name, "value": value}, "append_action": _OVERWRITE}


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any part of a configuration
    return {"name": name, "typed_config": {"@type": f"{_EXTENSIONS}.{kind}", **fields}}
