"""Groups of endpoints as the settings describe them, with their credentials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.relay.core.addresses import AddressError, parse_address
from services.relay.core.model import ANY_5XX, TIERS, Credential, Endpoint, Group, GroupKind
from services.relay.reading import Reading, first, is_closed_header
from services.relay.sections import CredentialSection, EndpointSection, GroupSection, UpstreamSection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.kit.config import Fault, Place

# What a local-first group takes for a passing failure of the worker, and not for the caller's fault.
_TRANSIENT: Final = frozenset({429, 502, 503, 504})
_LONGEST_SECRET: Final = 4096


def group_of(reading: Reading, name: str, section: UpstreamSection, kind: GroupKind, *, main: bool) -> Group:
    """Return one group of an upstream. `main`: it is the one whose endpoints may be written in short."""
    group: GroupSection = getattr(section, kind.value) or GroupSection()
    place: Place = ("upstreams", name, kind.value)
    local = kind is GroupKind.LOCAL
    if main and section.endpoints and group.endpoints:
        reading.refuse((*place, "endpoints"), "is said twice: the upstream's own `endpoints` are short for these")
    if group.min_free_mib is not None and not local:
        reading.refuse((*place, "min_free_mib"), "is for `local` endpoints: others need none of the device's memory")
    endpoints = _endpoints(reading, name, section, kind, main=main)
    if group.ca is not None and any(each.scheme == "http" for each in endpoints):
        reading.refuse((*place, "ca"), "is for https endpoints")
    return Group(
        kind=kind,
        endpoints=endpoints,
        tiers=_tiers(reading, name, group, kind),
        replay_statuses=_replayed(reading, name, section),
        credential=_credential(reading, name, group, kind),
        ca=_authority(reading, group.ca, (*place, "ca")),
        min_free_mib=first(reading.given(f"{name}_min_free_mib"), group.min_free_mib) if local else None,
    )


def _endpoints(
    reading: Reading, name: str, section: UpstreamSection, kind: GroupKind, *, main: bool
) -> tuple[Endpoint, ...]:
    """Return the endpoints: those that a variable names, else those of the file."""
    field = "upstream" if name == "default" else f"{name}_upstream"
    field = f"{name}_overflow_upstream" if kind is GroupKind.OVERFLOW else field
    listed: tuple[str, ...] = getattr(reading.settings, field, ())
    if listed:
        where = reading.at(field)
        endpoints = _parsed(reading, ((EndpointSection(address=text), where) for text in listed))
    else:
        short = main and bool(section.endpoints)
        group: GroupSection = getattr(section, kind.value) or GroupSection()
        place: Place = ("upstreams", name, *(() if short else (kind.value,)), "endpoints")
        where = reading.document.fault(place, "")
        written = (
            (
                EndpointSection(address=each) if isinstance(each, str) else each,
                reading.document.fault((*place, index), ""),
            )
            for index, each in enumerate(section.endpoints if short else group.endpoints)
        )
        endpoints = _parsed(reading, written)
    _check_one_cluster(reading, endpoints, where)
    return endpoints


def _parsed(reading: Reading, items: Iterable[tuple[EndpointSection, Fault]]) -> tuple[Endpoint, ...]:
    found: list[Endpoint] = []
    for item, where in items:
        try:
            found.append(replace(parse_address(item.address), weight=item.weight))
        except AddressError as error:
            reading.refuse(where, str(error))
    return tuple(found)


def _check_one_cluster(reading: Reading, endpoints: tuple[Endpoint, ...], where: Fault) -> None:
    """Refuse what one cluster of Envoy cannot say."""
    if len({(each.scheme, each.path_prefix) for each in endpoints}) > 1:
        reading.refuse(where, "endpoints of one group must share the scheme and the path")
    elif len({each.address for each in endpoints}) < len(endpoints):
        reading.refuse(where, "has an endpoint twice; give it a weight instead")


def _tiers(reading: Reading, name: str, group: GroupSection, kind: GroupKind) -> frozenset[str]:
    if name == "stt" and kind is GroupKind.OVERFLOW and reading.settings.stt_local_first:
        return frozenset()
    written = TIERS if group.tiers == "all" else group.tiers
    if kind is GroupKind.LOCAL:
        chosen = first(written, TIERS)
    else:
        knob = "overflow_tiers" if kind is GroupKind.OVERFLOW else "h3_tiers"
        chosen = first(reading.given(knob), written, getattr(reading.settings, knob))
    return frozenset() if set(chosen or ()) == set(TIERS) else frozenset(chosen or ())


def _replayed(reading: Reading, name: str, section: UpstreamSection) -> frozenset[int]:
    if section.replay_statuses is not None:
        return frozenset(section.replay_statuses)
    return _TRANSIENT if name == "stt" and reading.settings.stt_local_first else ANY_5XX


def _credential(reading: Reading, name: str, group: GroupSection, kind: GroupKind) -> Credential | None:
    field = f"{name}_overflow_api_key" if kind is GroupKind.OVERFLOW else f"{name}_api_key"
    key = getattr(reading.settings, field, None)
    if key is not None:
        value = _plain(reading, key.get_secret_value(), reading.at(field))
        return Credential("authorization", f"Bearer {value}") if value else None
    section = group.credential
    if section is None or reading.environ is None:
        return None
    place: Place = ("upstreams", name, kind.value, "credential")
    if is_closed_header(section.header):
        reading.refuse((*place, "header"), f"{section.header} is the mesh's own header")
    value = _plain(reading, _secret(reading, section, place), reading.document.fault(place, ""))
    return Credential(section.header.lower(), section.prefix + value) if value else None


def _secret(reading: Reading, section: CredentialSection, place: Place) -> str:
    if section.env is not None:
        value = (reading.environ or {}).get(section.env, "")
        if not value:
            reading.refuse((*place, "env"), f"variable {section.env} is not set")
        return value
    path = reading.resolved(section.file or Path())
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reading.refuse((*place, "file"), f"{path} cannot be read: {getattr(error, 'strerror', None) or 'no UTF-8'}")
        return ""
    if not value:
        reading.refuse((*place, "file"), f"{path} is empty")
    return value


def _plain(reading: Reading, value: str, where: Fault) -> str:
    """Return a secret that can stand in a header, or nothing."""
    if not value or (value.isascii() and value.isprintable() and len(value) <= _LONGEST_SECRET):
        return value
    reading.refuse(where, "the value cannot stand in a header: it must be printable ASCII on one line")
    return ""


def _authority(reading: Reading, path: Path | None, place: Place) -> str:
    if path is None:
        return ""
    resolved = reading.resolved(path)
    if reading.environ is not None and not resolved.is_file():
        reading.refuse(place, f"{resolved} is no file")
    return str(resolved)
