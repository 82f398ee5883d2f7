"""Configurations of the two Envoys that are measured against: the worker that answers, and the relay that only relays. Pure."""

from __future__ import annotations

from typing import Any

_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "envoy.extensions.filters.http.router.v3.Router"
_BUFFER = "envoy.extensions.filters.http.buffer.v3.Buffer"
_WIDE_OPEN = {"thresholds": [{"max_connections": 100000, "max_pending_requests": 100000, "max_requests": 100000}]}


def answering(port: int, body: str) -> dict[str, Any]:
    """Return the configuration of a worker that costs next to nothing: it answers every request itself with this JSON."""
    action = {
        "direct_response": {"status": 200, "body": {"inline_string": body}},
        "response_headers_to_add": [
            {
                "header": {"key": "content-type", "value": "application/json"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }
    # Who is answered before its request was read whole must give the connection up, so it is read whole first.
    reading = _filter("buffer", _BUFFER, max_request_bytes=1 << 20)
    return {"static_resources": {"listeners": [_listener(port, action, reading)]}}


def relaying(port: int, worker: int) -> dict[str, Any]:
    """Return the configuration of an Envoy that passes everything on to the worker: no filter, no log, no question."""
    endpoint = {"endpoint": {"address": _address(worker)}}
    cluster = {
        "name": "worker",
        "connect_timeout": "1s",
        "circuit_breakers": _WIDE_OPEN,
        "load_assignment": {"cluster_name": "worker", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    listener = _listener(port, {"route": {"cluster": "worker", "timeout": "0s"}})
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _listener(port: int, action: dict[str, Any], *filters: dict[str, Any]) -> dict[str, Any]:
    manager = {
        "@type": f"type.googleapis.com/{_MANAGER}",
        "stat_prefix": "door",
        "route_config": {
            "virtual_hosts": [{"name": "door", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, **action}]}]
        },
        "http_filters": [*filters, _filter("router", _ROUTER)],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": "door", "address": _address(port), "filter_chains": [chain]}


def _filter(name: str, kind: str, **fields: object) -> dict[str, Any]:
    return {
        "name": f"envoy.filters.http.{name}",
        "typed_config": {"@type": f"type.googleapis.com/{kind}", **fields},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
