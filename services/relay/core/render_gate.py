"""Routes of the gate, the internal listener that takes permits: whom admission let in goes to the worker, nobody else. Pure."""

from collections.abc import Sequence
from typing import Final

from services.relay.core.planning import Backing, PlannedRoute
from services.relay.core.render_nodes import (
    ADMITTED,
    OVERFLOW,
    ROUTE,
    WORKERS_NEVER_SEE,
    Node,
    Tree,
    is_exactly,
    seconds,
)
from services.relay.core.render_proxied import retries_of_unseen

EPOCHS: Final = ("e0", "e1")
"""Admission's epochs, odd and even: what still runs in the other one's clusters is exactly what remains of the past."""

UNADMITTED: Final = 591
"""Stands for the 503 `admission_unavailable`, which the gate's listener makes of it: its own other 503s have other reasons."""


def gated_cluster(backing: Backing, epoch: str) -> str:
    """Return the cluster behind the gate for one epoch of admission."""
    return f"{backing.upstream.name}.local.{epoch}"


def gate_routes(plan: Sequence[PlannedRoute]) -> Tree:
    """Return the route configuration `gate`."""
    gated = [route for route in plan if route.backing is not None and route.backing.gated]
    routes: list[Node] = [_route(route, epoch) for route in gated for epoch in EPOCHS]
    sentence = "Admission does not answer, so no permit could be had."
    routes.append(
        {"match": {"prefix": "/"}, "direct_response": {"status": UNADMITTED, "body": {"inline_string": sentence}}}
    )
    host: Tree = {
        "name": "gate",
        "domains": ["*"],
        "request_headers_to_remove": list(WORKERS_NEVER_SEE),
        "response_headers_to_remove": [OVERFLOW],  # only the gate itself says that the device is taken
        "routes": routes,
    }
    return {"name": "gate", "virtual_hosts": [host]}


def _route(route: PlannedRoute, epoch: str) -> Node:
    backing = route.proxied
    action: Tree = {
        "cluster": gated_cluster(backing, epoch),
        "timeout": seconds(route.timeout_ms or 0),
        "idle_timeout": seconds(backing.upstream.idle_timeout_ms),
        "auto_host_rewrite": True,
    }
    spare = len(backing.main.endpoints) > 1
    if spare or not backing.fallbacks:  # with another group waiting, one that does not answer is left at once
        action["retry_policy"] = retries_of_unseen(1 if backing.fallbacks else 2)
    match: Tree = {"prefix": "/", "headers": [is_exactly(ROUTE, route.spec.route_id), is_exactly(ADMITTED, epoch)]}
    return {"name": route.spec.route_id, "match": match, "route": action}
