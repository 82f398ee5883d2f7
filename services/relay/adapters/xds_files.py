"""The files that Envoy watches in `<state>/xds`: each is moved in whole, in the order in which Envoy can use them.

Envoy reads a file again when another is moved to its name. Endpoints come before the clusters that name them, clusters
before the routes that lead there; what is no longer needed goes last, when no route has led there for a moment.
"""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Final

import yaml

from services.kit.yaml_text import from_text, to_text
from services.relay.core.render import ROUTE_CONFIGURATIONS, Rendered
from services.relay.core.render_clusters import endpoints_file
from services.relay.core.render_nodes import TYPES, Node, Tree

_CLUSTERS: Final = "cds.yaml"
_CLUSTER: Final = f"{TYPES}envoy.config.cluster.v3.Cluster"
_ENDPOINTS: Final = f"{TYPES}envoy.config.endpoint.v3.ClusterLoadAssignment"
_ROUTES: Final = f"{TYPES}envoy.config.route.v3.RouteConfiguration"
# Envoy takes new routes within some 10 ms. Until then requests still go to clusters that are on their way out.
_LEAVING_S: Final = 1.0


class XdsFiles:
    """Owns the folder, also what a former process left there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clusters = _clusters_in(folder / _CLUSTERS)

    @property
    def folder(self) -> Path:
        """Return where the files are."""
        return self._folder

    def say(self, rendered: Rendered) -> bool:
        """Return whether the files say what is rendered, all of it."""
        wanted = {
            **{endpoints_file(name): _listing(_ENDPOINTS, [each]) for name, each in rendered.endpoints.items()},
            _CLUSTERS: _listing(_CLUSTER, list(rendered.clusters)),
            **{_routes_file(name): _listing(_ROUTES, [rendered.routes[name]]) for name in ROUTE_CONFIGURATIONS},
        }
        return all(_text(self._folder / name) == text for name, text in wanted.items())

    async def put(self, rendered: Rendered) -> None:
        """Make Envoy's files say what is rendered; those that say it already are not touched. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, assignment in rendered.endpoints.items():
            self._write(endpoints_file(name), _ENDPOINTS, [assignment])
        wanted = {str(each["name"]): each for each in rendered.clusters}
        leaving = {name: each for name, each in self._clusters.items() if name not in wanted}
        self._write(_CLUSTERS, _CLUSTER, [*wanted.values(), *leaving.values()])
        for name in ROUTE_CONFIGURATIONS:
            self._write(_routes_file(name), _ROUTES, [rendered.routes[name]])
        if leaving:
            await asyncio.sleep(_LEAVING_S)
            self._write(_CLUSTERS, _CLUSTER, list(wanted.values()))
        self._clusters = wanted
        self._remove_others({endpoints_file(name) for name in rendered.endpoints})

    def _write(self, name: str, kind: str, resources: list[Tree]) -> None:
        """Move a file of resources into place unless it says the same already. Only its owner reads it: it may hold keys."""
        text = _listing(kind, resources)
        path = self._folder / name
        if _text(path) == text:
            return
        part = self._folder / f".{name}.{os.getpid()}"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)

    def _remove_others(self, kept: set[str]) -> None:
        for path in self._folder.glob("eds.*.yaml"):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _listing(kind: str, resources: list[Tree]) -> str:
    """Return a file's text: resources of one kind, with a version that names them."""
    listed: list[Node] = [{"@type": kind, **each} for each in resources]
    version = hashlib.sha256(repr(listed).encode()).hexdigest()[:16]
    return to_text({"version_info": version, "resources": listed})


def _clusters_in(path: Path) -> dict[str, Tree]:
    """Return the clusters of a file by name; none when it is not there or damaged."""
    try:
        resources = from_text(path.read_text(encoding="utf-8"))["resources"]
        return {str(each["name"]): {key: node for key, node in each.items() if key != "@type"} for each in resources}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return {}


def _routes_file(name: str) -> str:
    return f"rds.{name}.yaml"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
