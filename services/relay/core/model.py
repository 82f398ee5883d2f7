"""Values of relay: upstreams with their groups of endpoints, and the public routes that they may serve."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

TIERS: Final = ("paid", "sub", "free", "background")
"""Callers' tiers, best first; the words of `x-omniserve-tier`."""

ANY_5XX: Final = frozenset(range(500, 600))
"""What a paid overflow is tried after, when the settings name no codes."""


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


class GroupKind(Enum):
    """What a group of endpoints is for; see the contract."""

    LOCAL = "local"
    OVERFLOW = "overflow"
    MANAGED = "managed"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of an upstream. `owner`: who set it while running; "" for one of the settings."""

    scheme: str
    host: str
    port: int
    weight: int = 1
    path_prefix: str = ""
    owner: str = ""
    instance_id: str = ""
    execution_tier: str = ""
    draining: bool = False

    @property
    def address(self) -> str:
        """Return it as scheme://host:port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credential:
    """A header that an upstream wants from us. The value is never shown."""

    header: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Group:
    """Endpoints of one priority.

    `tiers`: who may use it; empty means everybody. `replay_statuses`: the upstream's answers before the first byte after
    which its next group is tried; all its groups have the same. `ca`: "" for the system's authorities, else a file.
    `min_free_mib`: passed over with less free memory.
    """

    kind: GroupKind
    endpoints: tuple[Endpoint, ...]
    tiers: frozenset[str] = frozenset()
    replay_statuses: frozenset[int] = frozenset()
    credential: Credential | None = None
    ca: str = ""
    min_free_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """A worker API. `permits`: slots one request costs; None is the modality's default, 0 means not gated.

    `timeout_ms`: longest answer, None for none. `health_path`: probed actively; "" for no probes. `reuse_connections`:
    False closes each connection after its request.
    """

    name: str
    modality: str
    groups: tuple[Group, ...]
    permits: int | None = None
    timeout_ms: int | None = None
    idle_timeout_ms: int = 600_000
    max_body_mib: int = 80
    model_label: str = ""
    prefer_embedded: bool = False
    health_path: str = ""
    reuse_connections: bool = True

    def group(self, kind: GroupKind) -> Group | None:
        """Return its group of a kind, if it has one with endpoints."""
        return next((group for group in self.groups if group.kind is kind and group.endpoints), None)


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """A public route as the product knows it, whether or not anything serves it.

    `path`: exact, or a prefix when it ends in `*`. `upstream`: whose worker may serve it. `embedded`: a service of the
    mesh serves it when no upstream does. `spills`: and refuses at once, when it is told so, what its overflow can serve. `path_setting`: the setting that rewrites the upstream's path. `paying_tiers`:
    others get 402; empty means everybody may. `enabling_setting`: named by the 404 when nothing serves it.
    """

    route_id: str
    method: str
    path: str
    upstream: str
    modality: str
    embedded: bool = False
    spills: bool = False
    upstream_path: str = ""
    path_setting: str = ""
    forced_tier: str = ""
    paying_tiers: frozenset[str] = frozenset()
    enabling_setting: str = ""
    added_headers: Mapping[str, str] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class RouteOverride:
    """What the settings change about one route; None leaves it as it is."""

    upstream_path: str | None = None
    forced_tier: str | None = None
    paying_tiers: frozenset[str] | None = None
    timeout_ms: int | None = None
    added_headers: Mapping[str, str] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class RelayInputs:
    """What the settings ask for, checked.

    `upstreams`: every known name; one without endpoints is not configured, but its groups say on what terms a service
    may add some. A managed group's `tiers` are those of its routes, others get 402. `paths`: by the setting that
    `RouteSpec.path_setting` names (OMNISERVE_TTS_PATH). `overrides`: by route id. `authenticate_public`,
    `authenticate_operator`: whether callers of that listener must show who they are.
    """

    upstreams: Mapping[str, Upstream]
    paths: Mapping[str, str] = field(default_factory=_nothing)
    overrides: Mapping[str, RouteOverride] = field(default_factory=_nothing)
    authenticate_public: bool = False
    authenticate_operator: bool = False
