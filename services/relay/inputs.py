"""Turns the settings and the file into one checked value; what is wrong is told with its variable or its line."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from services.kit.config import ConfigError, Document, Place, nearest
from services.relay.core.model import GroupKind, RelayInputs, RouteOverride, Upstream
from services.relay.groups import group_of
from services.relay.reading import MODALITIES, Reading, first, is_closed_header, variable
from services.relay.sections import RouteSection, UpstreamSection, UpstreamsSection

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from services.relay.settings import RelaySettings

_MANAGED: Final = "h3"
_PATHS: Final = (
    "image_generate_path",
    "tts_path",
    "tts_openai_path",
    "stt_file_path",
    "stt_url_path",
    "stt_openai_path",
    "caption_path",
    "forecast_path",
    "three_d_path",
    "animation_path",
    "h3_path",
)


def assemble(
    settings: RelaySettings,
    document: Document,
    *,
    environ: Mapping[str, str] | None,
    has_keys: bool = False,
    route_ids: Collection[str] | None = None,
) -> RelayInputs:
    """Return what the settings ask for. `has_keys`: whether any key exists besides the settings' own.

    `environ` has the credentials that the file names; None leaves them and all other files alone, to check the rest.
    `route_ids` are the routes that can be changed; None believes every name. Raises ConfigError with every fault.
    """
    upstreams = document.section("upstreams", UpstreamsSection) or UpstreamsSection()
    routes = document.section("routes", dict[str, RouteSection]) or {}
    reading = Reading(settings, document, environ)
    inputs = RelayInputs(
        upstreams=MappingProxyType({name: _upstream(reading, name, upstreams) for name in MODALITIES}),
        paths=MappingProxyType(_paths(reading)),
        overrides=MappingProxyType({name: _override(reading, name, route) for name, route in routes.items()}),
        authenticate_public=has_keys or settings.secret is not None or bool(document.data.get("keys")),
        authenticate_operator=settings.operator_token is not None,
    )
    if route_ids is not None:
        _refuse_unknown_routes(reading, routes, route_ids)
    if reading.faults:
        raise ConfigError(reading.faults)
    return inputs


def _upstream(reading: Reading, name: str, sections: UpstreamsSection) -> Upstream:
    """Return an upstream with every group it may have, empty ones too."""
    section: UpstreamSection = getattr(sections, name) or UpstreamSection()
    kinds = (GroupKind.MANAGED,) if name == _MANAGED else (GroupKind.LOCAL, GroupKind.OVERFLOW)
    for kind in GroupKind:
        if kind not in kinds and getattr(section, kind.value) is not None:
            allowed = " and ".join(f"`{each.value}`" for each in kinds)
            reading.refuse(("upstreams", name, kind.value), f"{name} has {allowed} endpoints only")
    timeout_ms, idle_timeout_ms = _timeouts(reading, name, section)
    return Upstream(
        name=name,
        modality=MODALITIES[name],
        groups=tuple(group_of(reading, name, section, kind, main=kind is kinds[0]) for kind in kinds),
        permits=first(reading.given("h3_permits"), section.permits, 0) if name == _MANAGED else section.permits,
        timeout_ms=timeout_ms,
        idle_timeout_ms=idle_timeout_ms,
        max_body_mib=section.max_body_mib or reading.settings.body_limit_mib,
        model_label=reading.given(f"{name}_model") or section.model or "",
        prefer_embedded=bool(first(reading.given(f"{name}_prefer_embedded"), section.prefer_embedded)),
        health_path=reading.path(section.health_path or "", ("upstreams", name, "health_path")),
        reuse_connections=_reuse(reading, section),
    )


def _timeouts(reading: Reading, name: str, section: UpstreamSection) -> tuple[int | None, int]:
    """Return the longest answer and the longest silence, milliseconds."""
    settings = reading.settings
    idle_ms: int = reading.given("upstream_timeout_ms") or section.idle_timeout_ms or settings.upstream_timeout_ms
    if name != _MANAGED:
        return section.timeout_ms, idle_ms
    longest_ms: int = reading.given("h3_timeout_ms") or section.timeout_ms or settings.h3_timeout_ms
    return longest_ms, max(idle_ms, longest_ms)  # it says nothing until it has the answer


def _reuse(reading: Reading, section: UpstreamSection) -> bool:
    if reading.settings.upstream_idle is not None:
        return reading.settings.upstream_idle > 0
    return section.reuse_connections is not False


def _paths(reading: Reading) -> dict[str, str]:
    """Return the upstreams' paths that variables set, by variable."""
    found = {variable(name): reading.path(getattr(reading.settings, name), reading.at(name)) for name in _PATHS}
    return {name: path for name, path in found.items() if path}


def _override(reading: Reading, name: str, route: RouteSection) -> RouteOverride:
    place: Place = ("routes", name)
    for header in route.headers:
        if is_closed_header(header):
            reading.refuse((*place, "headers", header), "is the mesh's own header")
    path = route.upstream_path
    return RouteOverride(
        upstream_path=None if path is None else reading.path(path, (*place, "upstream_path")),
        forced_tier=route.tier,
        paying_tiers=None if route.paying_tiers is None else frozenset(route.paying_tiers),
        timeout_ms=route.timeout_ms,
        added_headers=MappingProxyType({key.lower(): value for key, value in route.headers.items()}),
    )


def _refuse_unknown_routes(reading: Reading, routes: Mapping[str, RouteSection], known: Collection[str]) -> None:
    for name in routes:
        if name not in known:
            near = nearest(name, sorted(known))
            reading.refuse(("routes", name), "no such route" + (f"; did you mean `{near}`?" if near else ""))
