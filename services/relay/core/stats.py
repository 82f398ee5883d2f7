"""Envoy's counters as values: what its stats say about the clusters of each upstream. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

_CLUSTER: Final = re.compile(
    r"cluster\.(?P<upstream>[a-z0-9_]+)\.(?P<group>local|overflow|managed)(?:\.(?P<epoch>e[01]))?\.(?P<metric>.+)"
)
_ACTIVE: Final = re.compile(r"http\.(public|operator|mesh)\.downstream_rq_active")
_SATURATED: Final = re.compile(r"gate\.overflow\.route\.(?P<route>.+)\.cause\.saturated")
_DRAINING_STATE: Final = 1
_METRICS: Final = (
    "upstream_rq_(total|active|pending_active|timeout|per_try_timeout|retry|[1-5]xx)",
    "upstream_cx_(total|active|connect_fail)",
    "membership_(healthy|total)",
    r"outlier_detection\.ejections_enforced_total",
    r"endpoint\..*\.(rq_active|healthy)",
)
FILTER: Final = (
    rf"^(cluster\.[a-z0-9_]+\.(local|overflow|managed)(\.e[01])?\.({'|'.join(_METRICS)})"
    r"|http\.(public|operator|mesh)\.downstream_rq_active|gate\.overflow\..*|server\.(state|live)|listener_manager\.total_listeners_draining)$"
)
"""Which of Envoy's stats are wanted, as its admin interface takes it."""


class StatsError(ValueError):
    """Something that Envoy's stats are not."""


@dataclass(frozen=True, slots=True)
class ClusterName:
    """A cluster of an upstream. `epoch`: e0 or e1 behind the gate, "" elsewhere."""

    upstream: str
    group: str
    epoch: str

    @property
    def text(self) -> str:
        """Return it as Envoy has it."""
        return ".".join(part for part in (self.upstream, self.group, self.epoch) if part)


@dataclass(frozen=True, slots=True)
class EndpointCounts:
    """One endpoint of a cluster. `healthy` None: not told."""

    active: int = 0
    healthy: bool | None = None


@dataclass(frozen=True, slots=True)
class UpstreamCounts:
    """One upstream since Envoy's start, over all its clusters.

    `gates`: requests at the worker and on the way to it, by cluster behind the gate. `members`: healthy and all endpoints by
    group. `places`: by group and address_port. `elsewhere`: requests that went to another group than the local one.
    """

    healthy: int = 0
    endpoints: int = 0
    requests: int = 0
    active: int = 0
    connections: int = 0
    active_connections: int = 0
    reused: int = 0
    connect_failures: int = 0
    timeouts: int = 0
    retries: int = 0
    elsewhere: int = 0
    ejections: int = 0
    responses: Mapping[str, int] = field(default_factory=dict)
    gates: Mapping[ClusterName, tuple[int, int]] = field(default_factory=dict)
    members: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    places: Mapping[tuple[str, str], EndpointCounts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EdgeStats:
    """One reading.

    `active`: requests under way through the listeners. `saturated`: those that found the device taken and had somewhere
    else to go, by route.
    """

    upstreams: Mapping[str, UpstreamCounts]
    active: int = 0
    draining: bool = False
    saturated: Mapping[str, int] = field(default_factory=dict)


def parse(found: Any) -> EdgeStats:  # noqa: ANN401 - JSON
    """Return what the decoded JSON of `/stats?format=json` says. Raises StatsError."""
    values = dict(_values(found))
    clusters: dict[ClusterName, dict[str, int]] = {}
    for name, value in values.items():
        match = _CLUSTER.fullmatch(name)
        if match:
            cluster = ClusterName(match["upstream"], match["group"], match["epoch"] or "")
            clusters.setdefault(cluster, {})[match["metric"]] = value
    upstreams = {cluster.upstream for cluster in clusters}
    saturated = {match["route"]: n for name, n in values.items() if (match := _SATURATED.fullmatch(name))}
    state = values.get("server.state") == _DRAINING_STATE or values.get("server.live") == 0
    return EdgeStats(
        upstreams=MappingProxyType(
            {name: _counts({c: m for c, m in clusters.items() if c.upstream == name}) for name in sorted(upstreams)}
        ),
        active=sum(value for name, value in values.items() if _ACTIVE.fullmatch(name)),
        draining=state or values.get("listener_manager.total_listeners_draining", 0) > 0,
        saturated=MappingProxyType(saturated),
    )


def _values(found: Any) -> Iterable[tuple[str, int]]:  # noqa: ANN401 - JSON
    try:
        for stat in found["stats"]:
            value = stat.get("value")
            if isinstance(value, int) and not isinstance(value, bool):
                yield str(stat["name"]), value
    except (KeyError, TypeError, AttributeError) as error:
        raise StatsError(f"these are no stats of Envoy: {error!r}") from error


def _counts(clusters: Mapping[ClusterName, Mapping[str, int]]) -> UpstreamCounts:
    total: Counter[str] = Counter()
    for metrics in clusters.values():
        total.update({name: value for name, value in metrics.items() if not name.startswith("endpoint.")})
    members = _members(clusters)
    elsewhere = sum(m.get("upstream_rq_total", 0) for c, m in clusters.items() if c.group != "local")
    made = total["upstream_cx_total"] - total["upstream_cx_connect_fail"]
    return UpstreamCounts(
        healthy=sum(healthy for healthy, _ in members.values()),
        endpoints=sum(known for _, known in members.values()),
        requests=total["upstream_rq_total"],
        active=total["upstream_rq_active"],
        connections=total["upstream_cx_total"],
        active_connections=total["upstream_cx_active"],
        reused=max(0, total["upstream_rq_total"] - made),
        connect_failures=total["upstream_cx_connect_fail"],
        timeouts=total["upstream_rq_timeout"] + total["upstream_rq_per_try_timeout"],
        retries=total["upstream_rq_retry"],
        elsewhere=elsewhere,
        ejections=total["outlier_detection.ejections_enforced_total"],
        responses={f"{n}xx": total[f"upstream_rq_{n}xx"] for n in range(1, 6) if total[f"upstream_rq_{n}xx"]},
        gates={
            cluster: (metrics.get("upstream_rq_active", 0), metrics.get("upstream_rq_pending_active", 0))
            for cluster, metrics in sorted(clusters.items(), key=lambda item: item[0].text)
            if cluster.epoch
        },
        members=members,
        places=_places(clusters),
    )


def _members(clusters: Mapping[ClusterName, Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """Return healthy and all endpoints by group. The clusters of both epochs lead to the same ones."""
    found: dict[str, tuple[int, int]] = {}
    for cluster, metrics in clusters.items():
        seen = metrics.get("membership_healthy", 0), metrics.get("membership_total", 0)
        before = found.get(cluster.group)
        found[cluster.group] = seen if before is None else (min(before[0], seen[0]), max(before[1], seen[1]))
    return found


def _places(clusters: Mapping[ClusterName, Mapping[str, int]]) -> dict[tuple[str, str], EndpointCounts]:
    """Return what is known of single endpoints: healthy when every cluster that leads there says so."""
    active: Counter[tuple[str, str]] = Counter()
    healthy: dict[tuple[str, str], bool] = {}
    for cluster, metrics in clusters.items():
        for name, value in metrics.items():
            if not name.startswith("endpoint."):
                continue
            place, _, metric = name.removeprefix("endpoint.").rpartition(".")
            key = cluster.group, place
            if metric == "rq_active":
                active[key] += value
            elif metric == "healthy":
                healthy[key] = healthy.get(key, True) and value > 0
    return {key: EndpointCounts(active[key], healthy.get(key)) for key in {*active, *healthy}}
