"""Route configurations of the listeners `public`, `operator` and `mesh`: what exists where, and with whose trust. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.relay.core.model import RelayInputs
from services.relay.core.planning import DEFAULT_TIER, PlannedRoute, Target
from services.relay.core.render_nodes import (
    MIB,
    MODE,
    OVERFLOW,
    DoorFacts,
    Node,
    Tree,
    fits,
    header,
    is_exactly,
    refusal,
    too_large,
    typed,
    unless,
)
from services.relay.core.render_proxied import absent_route, proxied_routes, spilling_routes
from services.relay.core.routes import KEYLESS_PATHS, SIGNED_PREFIX

EXT_AUTHZ: Final = "envoy.filters.http.ext_authz"
NOTES: Final = "envoy.filters.http.header_to_metadata"
_PER_ROUTE: Final = "envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute"

# Native gRPC and gRPC-Web go by allow-lists of full service names, with the cluster that serves each.
_PROBES: Final = ("grpc.health.v1.Health",)
_REFLECTION: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
PUBLIC_RPCS: Final = (
    ("omniserve.llm.v1.LlmService", "llm"),
    ("omniserve.diffusion.v1.DiffusionService", "diffusion"),
)
OPERATOR_RPCS: Final = (
    *PUBLIC_RPCS,
    ("omniserve.llm.v1.LlmAdminService", "llm"),
    ("omniserve.diffusion.v1.DiffusionAdminService", "diffusion"),
    ("omniserve.admission.v1.AdmissionService", "admission"),
    ("omniserve.admission.v1.AdmissionAdminService", "admission"),
    ("omniserve.vram.v1.VramService", "vram"),
    ("omniserve.vram.v1.VramAdminService", "vram"),
    ("omniserve.relay.v1.RelayService", "relay"),
    ("omniserve.relay.v1.RelayAdminService", "relay"),
)

_PROBED_PATHS: Final = ("/health", "/readyz")
_PROBED_PREFIXES: Final = tuple(f"/{name}/" for name in _PROBES)
# Bodies that can be sent again are kept until the service answers; with longer ones a restart is met.
_KEPT_BYTES: Final = 8 * MIB

# Where keys are shown.
_KEYS: Final = ("authorization", "x-api-key", "x-rapid-api-key", "secret")
_KEY_IN_QUERY: Final = r"[^?]*\?(.*&)?secret(=.*|&.*)?"
# Credentials end here, and what the listeners put aside for admission.
_NOT_FOR_UPSTREAMS: Final = (
    *_KEYS,
    "x-om-service-token",
    "x-om-client",
    MODE,
)


@dataclass(frozen=True, slots=True)
class Listener:
    """A listener's trust. `client`: who calls when nobody checked. `token`: the variable of Envoy that holds its token."""

    name: str
    client: str
    token: str
    authenticated: bool
    rpcs: tuple[tuple[str, str], ...]


def listeners(inputs: RelayInputs, door: DoorFacts) -> tuple[Listener, ...]:
    """Return the three of them. A call from inside the mesh reaches what the public reaches, and is always checked."""
    public, operator = "OMNISERVE_EDGE_PUBLIC_TOKEN", "OMNISERVE_EDGE_OPERATOR_TOKEN"
    return (
        Listener("public", "anonymous", public, inputs.authenticate_public or door.checks_everybody, PUBLIC_RPCS),
        Listener("operator", "operator", operator, inputs.authenticate_operator, OPERATOR_RPCS),
        Listener("mesh", "anonymous", public, authenticated=True, rpcs=PUBLIC_RPCS),
    )


def listener_routes(listener: Listener, plan: Sequence[PlannedRoute], door: DoorFacts) -> Tree:
    """Return the route configuration of a listener."""
    is_operator = listener.name == "operator"
    hosts: list[Node] = [_foreign_host()] if is_operator else []
    domains: list[Node] = list(door.operator_hosts) if is_operator else ["*"]
    guards = [*_operator_guards(door), _stats_of_envoy()] if is_operator else [_not_here()]
    host: Tree = {
        "name": listener.name,
        "domains": domains,
        "request_headers_to_add": [
            header("x-omniserve-listener", listener.name),
            header("x-omniserve-client", listener.client, if_absent=True),
        ],
        "response_headers_to_add": [header("traceparent", "%REQ(traceparent)%")],
        "response_headers_to_remove": [OVERFLOW],
        "typed_per_filter_config": {EXT_AUTHZ: _authorisation(listener), NOTES: _noted(listener)},
        "routes": [*guards, too_large({"prefix": "/"}, door.body_limit_mib), *_services(listener, plan, door)],
    }
    return {
        "name": listener.name,
        "request_headers_to_remove": list(_NOT_FOR_UPSTREAMS),
        "most_specific_header_mutations_wins": True,
        "ignore_port_in_host_matching": is_operator,
        "virtual_hosts": [*hosts, host],
    }


def _services(listener: Listener, plan: Sequence[PlannedRoute], door: DoorFacts) -> list[Node]:
    """Return what serves requests: RPCs by name, then workers (or who they would be), then the facade."""
    routes: list[Node] = [_rpc(name, cluster, listener, door) for name, cluster in listener.rpcs]
    routes += [_open(_rpc(name, "llm", listener, door)) for name in _PROBES]
    routes += [_rpc(name, "llm", listener, door) for name in _REFLECTION]
    routes.append(_unknown_rpc())
    for route in plan:
        if route.target is Target.PROXIED:
            routes += proxied_routes(route, door, internal=listener.name == "mesh")
        elif route.target is Target.EMBEDDED:
            routes += spilling_routes(route, _own({"path": route.spec.path}, "facade", listener, door))
        elif route.target is Target.DISABLED and route.spec.enabling_setting:
            routes.append(absent_route(route))
    if listener.authenticated:
        routes += [_open(_own({"path": path}, "facade", listener, door)) for path in KEYLESS_PATHS]
        routes.append(_open(_own({"prefix": SIGNED_PREFIX, "headers": _without_key()}, "facade", listener, door)))
    else:
        routes += [_own({"path": path}, "facade", listener, door) for path in _PROBED_PATHS]
    return [*routes, _own({"prefix": "/"}, "facade", listener, door)]


def _rpc(name: str, cluster: str, listener: Listener, door: DoorFacts) -> Tree:
    return _own({"prefix": f"/{name}/"}, cluster, listener, door)


def _own(match: Tree, cluster: str, listener: Listener, door: DoorFacts) -> Tree:
    """Return a route to a service of the mesh, with the listener's token.

    A stream may last as long as it moves. A retry is for a request that no service has seen: one is being restarted, which
    takes up to half a minute on a busy machine. Who wants to know how things are is not kept waiting.
    """
    is_probe = match.get("path") in _PROBED_PATHS or match.get("prefix") in _PROBED_PREFIXES
    action: Tree = {
        "cluster": cluster,
        "timeout": "0s",
        "idle_timeout": f"{door.stream_idle_timeout_s}s",
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset-before-request",
            "num_retries": 3 if is_probe else door.hold_retries,
            "retry_back_off": {"base_interval": "0.1s", "max_interval": "0.5s"},
        },
    }
    token = header("x-omniserve-service-token", f"%ENVIRONMENT({listener.token})%")
    route: Tree = {"match": match, "route": action, "request_headers_to_add": [token]}
    return route if is_probe else {**route, "request_body_buffer_limit": _KEPT_BYTES}


def _authorisation(listener: Listener) -> Tree:
    """Return whether callers are checked, and what admission is told about where they came in."""
    if not listener.authenticated:
        return typed(_PER_ROUTE, disabled=True)
    return typed(_PER_ROUTE, check_settings={"context_extensions": {"listener": listener.name}})


def _noted(listener: Listener) -> Tree:
    """Return what the access log is told about the caller, before headers are removed on the way to somebody else."""
    return typed(
        "envoy.extensions.filters.http.header_to_metadata.v3.Config",
        request_rules=[
            _note("x-omniserve-client", "client", listener.client),
            _note("x-omniserve-tier", "tier", DEFAULT_TIER),
        ],
    )


def _note(name: str, key: str, otherwise: str) -> Node:
    place: Tree = {"metadata_namespace": "omniserve.caller", "key": key}
    return {"header": name, "on_header_present": place, "on_header_missing": {**place, "value": otherwise}}


def _open(route: Tree) -> Tree:
    """Return the route for callers without a key too."""
    return {**route, "typed_per_filter_config": {EXT_AUTHZ: typed(_PER_ROUTE, disabled=True)}}


def _without_key() -> list[Node]:
    """Return a match on requests that show no key anywhere."""
    present: list[Tree] = [{"name": name, "present_match": True} for name in _KEYS]
    return [unless(each) for each in (*present, fits(":path", _KEY_IN_QUERY))]


def _not_here() -> Tree:
    sentence = "Not found. Operator routes are on the operator listener only."
    return refusal({"safe_regex": {"regex": "/(admin|v1/gpu|v1/host)(/.*)?"}}, 404, sentence)


def _unknown_rpc() -> Tree:
    grpc: Tree = {"name": "content-type", "string_match": {"prefix": "application/grpc", "ignore_case": True}}
    sentence = "No such RPC here: this listener routes an allow-list of gRPC services."
    return refusal({"prefix": "/", "headers": [grpc]}, 404, sentence)


def _foreign_host() -> Tree:
    """Return the host for pages whose name was rebound to this address: they still send their own name."""
    sentence = (
        "This Host is not allowed on the operator listener; use a loopback name, "
        "or add yours to OMNISERVE_EDGE_OPERATOR_HOSTS."
    )
    unchecked: Tree = {EXT_AUTHZ: typed(_PER_ROUTE, disabled=True)}
    routes: list[Node] = [refusal({"prefix": "/"}, 403, sentence)]
    return {"name": "foreign_host", "domains": ["*"], "typed_per_filter_config": unchecked, "routes": routes}


def _operator_guards(door: DoorFacts) -> list[Node]:
    """Return what keeps web pages out: browsers name the page in Origin, and send JSON only after asking."""
    present: Tree = {"name": "origin", "present_match": True}
    foreign = refusal(
        {"prefix": "/", "headers": [present, unless(fits("origin", door.operator_origins))]},
        403,
        "This Origin is not allowed on the operator listener; see OMNISERVE_EDGE_OPERATOR_ORIGINS.",
    )
    json = fits("content-type", r"(?i)application/(json|grpc|grpc[+-][a-z+-]+)\s*(;.*)?")
    not_json: Tree = {**unless(json), "treat_missing_header_as_empty": True}
    writes = refusal(
        {"prefix": "/", "headers": [unless(fits(":method", "GET|HEAD|OPTIONS")), not_json]},
        415,
        "Writes on the operator listener need Content-Type: application/json, even without a body.",
    )
    return [foreign, writes]


def _stats_of_envoy() -> Tree:
    """Return the way for admission and relay to Envoy's counters, which the admin interface shows on loopback anyway."""
    action: Tree = {"cluster": "envoy_admin", "prefix_rewrite": "/stats", "host_rewrite_literal": "localhost"}
    return _open({"match": {"path": "/admin/envoy/stats", "headers": [is_exactly(":method", "GET")]}, "route": action})
