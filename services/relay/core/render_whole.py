"""The static and the dynamic half as one configuration without files, so that Envoy can judge it as a whole. Pure."""

from collections.abc import Mapping
from typing import cast

from services.relay.core.render import Rendered
from services.relay.core.render_nodes import Node, Tree


def whole(static: Tree, rendered: Rendered) -> Tree:
    """Return Envoy's static configuration with the rendered clusters, endpoints and routes in their places."""
    resources = cast("Tree", static["static_resources"])
    clusters = [
        *cast("list[Node]", resources["clusters"]),
        *(_standing(c, rendered.endpoints) for c in rendered.clusters),
    ]
    listeners: list[Node] = [_with_routes(each, rendered.routes) for each in cast("list[Node]", resources["listeners"])]
    kept = {name: node for name, node in static.items() if name != "dynamic_resources"}
    return {**kept, "static_resources": {**resources, "listeners": listeners, "clusters": clusters}}


def _standing(cluster: Tree, endpoints: Mapping[str, Tree]) -> Tree:
    if cluster["type"] != "EDS":
        return cluster
    source = cast("Tree", cluster["eds_cluster_config"])
    kept = {name: node for name, node in cluster.items() if name != "eds_cluster_config"}
    return {**kept, "type": "STATIC", "load_assignment": endpoints[str(source["service_name"])]}


def _with_routes(node: Node, routes: Mapping[str, Tree]) -> Node:
    """Return the node with each reference to a route configuration replaced by that configuration."""
    if isinstance(node, list):
        return [_with_routes(each, routes) for each in node]
    if not isinstance(node, dict):
        return node
    found: Tree = {name: _with_routes(each, routes) for name, each in node.items() if name != "rds"}
    if "rds" in node:
        found["route_config"] = routes[str(cast("Tree", node["rds"])["route_config_name"])]
    return found
