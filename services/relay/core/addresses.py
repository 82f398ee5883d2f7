"""Addresses of upstreams: which are allowed, and what they mean."""

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

from services.relay.core.model import Endpoint

_PORTS: Final = {"http": 80, "https": 443}
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_PATH: Final = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)*/?")
_VISIBLE: Final = re.compile(r"[\x21-\x7e]+")
# What is behind the box's own walls: this machine, private networks, and what overlay networks hand out.
_PRIVATE: Final = tuple(
    ipaddress.ip_network(net)
    for net in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7")
)


class AddressError(ValueError):
    """An address that cannot be an upstream's; the message never repeats credentials."""


def parse_address(text: str) -> Endpoint:
    """Return the endpoint that `scheme://host[:port][/prefix]` means.

    Raises AddressError: plain http is for private addresses and for names without dots (those of one's own network),
    everything else is https; no credentials, query or fragment.
    """
    try:
        parts = urlsplit(text if _VISIBLE.fullmatch(text) else "")
    except ValueError:  # brackets without their other half
        parts = urlsplit("")
    if parts.scheme not in _PORTS or not parts.netloc:
        raise AddressError("is no address: write http://host:port or https://host")
    if "@" in parts.netloc:
        raise AddressError("must not hold credentials: name the variable or file that has them in `credential`")
    if parts.query or parts.fragment or text.endswith(("?", "#")):
        raise AddressError("must not hold a query or a fragment")
    host, port = _host_and_port(parts.netloc, _PORTS[parts.scheme])
    if parts.scheme == "http" and not _may_be_plain(host):
        raise AddressError(f"must be https: {host} is neither a private address nor a name without dots")
    return Endpoint(parts.scheme, host, port, path_prefix=checked_path(parts.path).rstrip("/"))


def checked_path(path: str) -> str:
    """Return an upstream's path as it is. Raises AddressError for what Envoy or a worker might read in another way."""
    if path and not _PATH.fullmatch(path):
        raise AddressError(f"path {path[:80]!r} must begin with / and hold plain characters only, no empty segments")
    if any(segment in (".", "..") for segment in path.split("/")):
        raise AddressError(f"path {path[:80]!r} must not hold . or .. segments")
    return path


def _host_and_port(netloc: str, default: int) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", netloc)
    if match is None:
        raise AddressError("is no address: write http://host:port, an IPv6 address in [brackets]")
    host = match[1] or match[2].lower()
    port = default if match[3] is None else int(match[3])
    if not 1 <= port <= 65_535:
        raise AddressError(f"port {port} is not within 1 and 65535")
    return _checked_host(host, is_ip6=match[1] is not None), port


def _checked_host(host: str, *, is_ip6: bool) -> str:
    address = _ip(host)
    if address is not None:
        if address.is_unspecified or address.is_multicast or address.is_link_local:
            raise AddressError(f"{host} is no address of a worker")
        return str(address)
    labels = host.split(".")
    if is_ip6 or labels[-1].isdecimal() or len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise AddressError(f"{host[:80]!r} is neither a name nor an IP address")
    return host


def _may_be_plain(host: str) -> bool:
    address = _ip(host)
    if address is None:
        return "." not in host
    return any(address in network for network in _PRIVATE if network.version == address.version)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
