"""Routes of the listeners to what upstreams serve: past the gate when a permit is due, on to the next group when it pays. Pure."""

import re
from collections.abc import Iterable
from typing import Final

from services.relay.core.model import ANY_5XX, TIERS, Group
from services.relay.core.planning import DEFAULT_TIER, Backing, PlannedRoute, TierRule, tier_rules
from services.relay.core.render_nodes import (
    ASK,
    FACTS,
    GATE,
    INTERNAL,
    MIB,
    MODE,
    ORIGINAL_PATH,
    OVERFLOW,
    REFUSES,
    ROUTE,
    DoorFacts,
    Node,
    Tree,
    asks_for_tier,
    header,
    headers,
    is_exactly,
    refusal,
    seconds,
    too_large,
)
from services.relay.core.routes import ANY_METHOD

# What can be sent again must be kept: an upload of 80 MiB, with what a form adds to it.
_KEPT_BYTES: Final = 90 * MIB
# Nothing has seen the request: it may be sent again whatever it does.
_UNSEEN: Final = "connect-failure,refused-stream,reset-before-request"
STAYS: Final = "stay"
"""In an ask: nowhere else to go; it is no overflow when the device is taken."""
_VARIABLE: Final = re.compile(r"\{[a-z_]+\}")


def cluster_of(backing: Backing, group: Group) -> str:
    """Return the cluster that a listener's route leads to for a group that takes no permit."""
    return f"{backing.upstream.name}.{group.kind.value}"


def proxied_routes(route: PlannedRoute, door: DoorFacts, *, internal: bool) -> list[Node]:
    """Return a proxied route's entries, best match first. `internal`: for callers inside the mesh."""
    match = _match(route)
    entries: list[Node] = []
    if route.proxied.upstream.max_body_mib < door.body_limit_mib:
        entries.append(too_large(match, route.proxied.upstream.max_body_mib))
    rules = tier_rules(route)
    matches = [match if rule is rules[-1] else _for_tiers(match, rule.tiers) for rule in rules]
    for rule, each in zip(rules, matches, strict=True):
        if internal and route.proxied.gated and not rule.refused and not rule.fallbacks:
            entries.append(_impatient(_entry(route, rule, each, door, internal), route))
        entries.append(_entry(route, rule, each, door, internal))
    return entries


def _impatient(entry: Tree, route: PlannedRoute) -> Tree:
    """Return the entry for services that want a permit at once or none."""
    match, added = entry["match"], entry["request_headers_to_add"]
    assert isinstance(match, dict)  # noqa: S101 - made here
    assert isinstance(added, list)  # noqa: S101 - made here
    declared = match.get("headers", [])
    assert isinstance(declared, list)  # noqa: S101 - made here
    return {
        **entry,
        "match": {**match, "headers": [*declared, is_exactly(MODE, "try")]},
        "request_headers_to_add": [*added, header(ASK, f"{ask(route, may_leave=True)};{STAYS}")],
    }


def spilling_routes(route: PlannedRoute, own: Tree) -> list[Node]:
    """Return an embedded route's entries for the tiers whose requests may go elsewhere, best match first.

    `own`: the entry that leads to the service itself, for everybody else. A failure that the service has not marked is its answer.
    """
    elsewhere, leads = route.elsewhere, own["route"]
    if elsewhere is None:
        return []
    assert isinstance(leads, dict)  # noqa: S101 - made here
    own_cluster, match = leads["cluster"], _match(route)
    assert isinstance(own_cluster, str)  # noqa: S101 - made here
    leads = {name: value for name, value in leads.items() if name != "cluster"}
    added = own["request_headers_to_add"]
    assert isinstance(added, list)  # noqa: S101 - made here
    entry: Tree = {
        "name": route.spec.route_id,
        "match": match,
        "route": {
            **leads,
            **_in_order([own_cluster, cluster_of(elsewhere, elsewhere.main)]),
            "auto_host_rewrite": True,
            "retry_policy": _onwards(frozenset(), 1),
        },
        "request_headers_to_add": [*added, header(REFUSES, "try")],
        "request_body_buffer_limit": _KEPT_BYTES,
    }
    allowed = tuple(tier for tier in TIERS if not elsewhere.main.tiers or tier in elsewhere.main.tiers)
    if DEFAULT_TIER not in allowed:
        return [{**entry, "match": _for_tiers(match, allowed)}] if allowed else []
    others = tuple(tier for tier in TIERS if tier not in allowed)
    return [{**own, "match": _for_tiers(match, others)}, entry] if others else [entry]


def absent_route(route: PlannedRoute) -> Node:
    """Return the answer of a route that nothing serves: the setting that would change that."""
    setting = route.spec.enabling_setting
    return refusal(_match(route), 404, f"Nothing is configured for {route.spec.path}; {setting} says who serves it.")


def _entry(route: PlannedRoute, rule: TierRule, match: Tree, door: DoorFacts, internal: bool) -> Tree:  # noqa: FBT001
    if rule.refused:
        allowed = ", ".join(tier for tier in TIERS if tier in route.paying_tiers)
        return refusal(match, 402, f"This route is for the tiers {allowed}; the request has another one.")
    entry: Tree = {
        "name": route.spec.route_id,
        "match": match,
        "route": _action(route, rule, door),
        "request_headers_to_add": _request_headers(route, rule, internal),
    }
    if rule.fallbacks:
        entry["request_body_buffer_limit"] = _KEPT_BYTES
    if told := _response_headers(route):
        entry["response_headers_to_add"] = told
    return entry


def _match(route: PlannedRoute) -> Tree:
    path = route.spec.path
    if _VARIABLE.search(path):
        literal = _VARIABLE.split(path)
        match: Tree = {"safe_regex": {"regex": "[^/]+".join(re.escape(part) for part in literal)}}
    elif path.endswith("*"):
        match = {"prefix": path[:-1]}
    else:
        match = {"path": path}
    if route.spec.method != ANY_METHOD:
        match["headers"] = [is_exactly(":method", route.spec.method)]
    return match


def _for_tiers(match: Tree, tiers: Iterable[str]) -> Tree:
    declared = match.get("headers", [])
    assert isinstance(declared, list)  # noqa: S101 - made here
    return {**match, "headers": [*declared, asks_for_tier(tiers)]}


def _request_headers(route: PlannedRoute, rule: TierRule, internal: bool) -> list[Node]:  # noqa: FBT001
    added = headers(route.added_headers)
    if route.upstream_path:
        added.append(header(ORIGINAL_PATH, "%PATH(NQ)%"))  # for the access log, which would see the worker's path
    if internal:
        added.append(header(INTERNAL, "local"))
    if route.proxied.gated:
        added += [header(ROUTE, route.spec.route_id), header(ASK, ask(route, may_leave=bool(rule.fallbacks)))]
    return added


def ask(route: PlannedRoute, *, may_leave: bool) -> str:
    """Return what the gate shall ask admission for. `may_leave`: it does not wait, since another group can serve."""
    backing, spec = route.proxied, route.spec
    parts = [f"route={spec.route_id}", f"upstream={backing.upstream.name}", f"modality={spec.modality}"]
    parts += [f"units={backing.units}"] if backing.units is not None else []
    parts += [f"tier={route.forced_tier}"] if route.forced_tier else []
    parts += ["try"] if may_leave else []
    parts += [f"paying={'+'.join(sorted(route.paying_tiers))}"] if route.paying_tiers else []
    return ";".join(parts)


def _response_headers(route: PlannedRoute) -> list[Node]:
    """Return what callers are told about who served them: facts of the endpoint that was tried last."""
    if route.spec.modality == "stt":
        return [
            header("x-omniserve-asr-backend", f"%UPSTREAM_METADATA({FACTS}:backend)%"),
            header("x-omniserve-asr-attempts", "%UPSTREAM_REQUEST_ATTEMPT_COUNT%"),
        ]
    if route.spec.modality == "video":
        return [header("x-appnz-execution-tier", f"%UPSTREAM_METADATA({FACTS}:execution_tier)%")]
    return []


def _action(route: PlannedRoute, rule: TierRule, door: DoorFacts) -> Tree:
    backing = route.proxied
    first = GATE if backing.gated else cluster_of(backing, backing.main)
    targets = [first, *(cluster_of(backing, group) for group in rule.fallbacks)]
    # A wait for a permit is no answer that takes too long: behind the gate the clock starts with the permit.
    limit_ms = 0 if backing.gated and not rule.fallbacks else (route.timeout_ms or 0) * len(targets)
    action: Tree = {
        **({"cluster": first} if len(targets) == 1 else _in_order(targets)),
        "timeout": seconds(limit_ms),
        "idle_timeout": seconds(max(backing.upstream.idle_timeout_ms, door.stream_idle_timeout_s * 1000)),
        "auto_host_rewrite": True,
    }
    if route.upstream_path:
        action["regex_rewrite"] = {"pattern": {"regex": "^/.*"}, "substitution": route.upstream_path}
    if rule.fallbacks:
        tried = [backing.main, *rule.fallbacks[:-1]]
        codes = frozenset().union(*(group.replay_statuses for group in tried))
        action["retry_policy"] = _onwards(codes, len(rule.fallbacks))
    elif not backing.gated:
        action["retry_policy"] = retries_of_unseen(2)
    return action


def _in_order(targets: list[str]) -> Tree:
    groups: list[Node] = [{"name": each, "clusters": [{"cluster_name": each, "weight": 1}]} for each in targets]
    specifier: Tree = {
        "@type": "type.googleapis.com/"
        "envoy.extensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier",
        "priority_groups": groups,
    }
    name = "envoy.router.cluster_specifier_plugin.priority_group"
    return {"inline_cluster_specifier_plugin": {"extension": {"name": name, "typed_config": specifier}}}


def _onwards(codes: frozenset[int], groups: int) -> Tree:
    """Return when the next of so many groups is tried: nothing there, by the mesh's own word, or a code that says so."""
    conditions = ["connect-failure", "refused-stream", "reset", "retriable-headers"]
    policy: Tree = {
        "retriable_headers": [{"name": OVERFLOW, "present_match": True}],
        "num_retries": groups,
        "refresh_cluster_on_retry": True,
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.002s"},
    }
    if codes >= ANY_5XX:
        conditions.append("5xx")
        codes -= ANY_5XX
    if codes:
        conditions.append("retriable-status-codes")
        policy["retriable_status_codes"] = [*sorted(codes)]
    return {"retry_on": ",".join(conditions), **policy}


def retries_of_unseen(times: int) -> Tree:
    """Return a retry policy for requests that no worker has seen."""
    return {
        "retry_on": _UNSEEN,
        "num_retries": times,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 3,
        "retry_back_off": {"base_interval": "0.05s", "max_interval": "0.5s"},
    }
