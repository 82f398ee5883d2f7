"""Everything that relay tells Envoy, from one value of the settings. Pure: the same inputs give the same files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.relay.core.model import RelayInputs
from services.relay.core.planning import PlannedRoute, plan
from services.relay.core.render_clusters import clusters, endpoints, uses
from services.relay.core.render_gate import gate_routes
from services.relay.core.render_listeners import listener_routes, listeners
from services.relay.core.render_nodes import DoorFacts, Tree

ROUTE_CONFIGURATIONS: Final = ("gate", "public", "operator", "mesh")
"""The gate's first: the listeners' routes lead there."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Envoy's dynamic configuration. `endpoints` by group, `routes` by route configuration; `version` names the whole."""

    plan: tuple[PlannedRoute, ...]
    endpoints: Mapping[str, Tree]
    clusters: Sequence[Tree]
    routes: Mapping[str, Tree]
    version: str


def render(inputs: RelayInputs, door: DoorFacts, *, xds_dir: str) -> Rendered:
    """Return what the settings mean for Envoy. `xds_dir`: where Envoy finds the files."""
    planned = plan(inputs)
    used = uses(planned)
    groups = endpoints(used)
    upstreams = clusters(used, xds_dir=xds_dir, ca=door.ca)
    routes = {"gate": gate_routes(planned)}
    routes |= {each.name: listener_routes(each, planned, door) for each in listeners(inputs, door)}
    content = json.dumps([groups, upstreams, routes], sort_keys=True)
    return Rendered(planned, groups, upstreams, routes, hashlib.sha256(content.encode()).hexdigest()[:16])
