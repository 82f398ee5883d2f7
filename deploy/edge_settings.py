"""Settings of the front door (Envoy)."""

import ipaddress
import re
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit

from pydantic import SecretStr, model_validator

from services.kit import keyring
from services.kit.config import config_knob, read
from services.kit.settings import Address, MeshSettings, body_limit_knob, knob

_HOST = re.compile(r"[A-Za-z0-9.:_-]+|\[[0-9A-Fa-f:]+\]")


class EdgeSettings(MeshSettings):
    """What the front door needs to know."""

    service: ClassVar[str] = "edge"

    port: int = knob(8791, "Port of the public listener.", aliases=("OMNISERVE_PORT",), ge=1, le=65535)
    bind: str = knob(
        "127.0.0.1",
        "Address of the public listener. Other than loopback needs an API key, or OMNISERVE_ALLOW_ANONYMOUS=1.",
        aliases=("OMNISERVE_BIND",),
    )
    published_bind: str = knob(
        "",
        "Where a container runtime publishes the public listener; when set, the rule for anonymous callers looks at it instead of `bind`.",
    )
    allow_anonymous: bool = knob(
        False,  # noqa: FBT003 - the default
        "Serve callers nobody knows on an address that others can reach.",
        aliases=("OMNISERVE_ALLOW_ANONYMOUS",),
    )
    anonymous_tier: str = knob(
        "auto",
        "Best tier of callers without a key; the front door only wants to know whether there is a limit, admission sets it.",
        aliases=("OMNISERVE_ANONYMOUS_TIER",),
    )
    config: Path | None = config_knob()
    secret: SecretStr = knob(
        SecretStr(""),
        "The shared key; the front door only wants to know that there is one, admission checks it.",
        aliases=("OMNISERVE_SECRET",),
        secret=True,
    )
    operator_port: int = knob(8792, "Port of the operator listener.", ge=1, le=65535)
    operator_bind: str = knob(
        "127.0.0.1",
        "Address of the operator listener: loopback, or a container's own network that publishes it on loopback only.",
    )
    operator_hosts: tuple[str, ...] = knob(
        (), "Names besides the loopback ones that the Host header may carry on the operator listener."
    )
    operator_origins: tuple[str, ...] = knob(
        (), "Origins (http://host:port) of web pages that may drive the operator listener, besides its own."
    )
    mesh_port: int = knob(8793, "Port of the listener for services of the mesh, which show a token.", ge=1, le=65535)
    mesh_bind: str = knob(
        "127.0.0.1",
        "Address of the mesh listener: loopback, or a container's own network that does not publish it.",
    )
    admin_port: int = knob(9190, "Port of Envoy's admin interface on loopback.", ge=1, le=65535)
    admission_checks_address: Address | None = knob(
        None, "Where Envoy asks admission about each request; by default the port of admission's address plus 11."
    )
    facade_address: Address = knob(
        "127.0.0.1:9100", "Where the facade is called.", aliases=("OMNISERVE_FACADE_ADDRESS",)
    )
    body_limit_mib: int = body_limit_knob("Largest request body.")
    stream_idle_timeout_s: int = knob(
        600, "How long a request may be silent in both directions before it is ended.", unit="s", ge=1, le=86_400
    )
    max_connections: int = knob(20_000, "Most connections of callers at once.", ge=1)
    workers: int = knob(0, "Worker threads of Envoy; 0 means one per core.", ge=0, le=1024)
    traced_percent: float = knob(
        100.0,
        "Share of requests that are traced, where tracing is on; a caller's own trace is always followed as it says.",
        unit="%",
        ge=0,
        le=100,
    )
    envoy: str = knob("", "The Envoy binary; empty means the one in the virtual environment.")
    hold_s: int = knob(
        30,
        "How long about a request is held for a service that restarts and has not seen it; then 503.",
        unit="s",
        ge=1,
        le=600,
    )
    drain_notice_s: int = knob(
        1,
        "How long a stopping front door reports 503 on /healthz while it still accepts connections.",
        unit="s",
        ge=1,
        le=600,
    )
    drain_limit_s: int = knob(
        30, "How long a stopping front door waits for running streams before it cuts them.", unit="s", ge=0, le=86_400
    )

    @model_validator(mode="after")
    def _safe(self) -> Self:
        is_open = not is_loopback(self.published_bind or self.bind)
        if is_open and not self.allow_anonymous and not self.has_keys():
            raise ValueError(
                f"the public listener would serve anonymous callers on {self.published_bind or self.bind}: make an API key "
                "(`omniserve keys create NAME`), bind it to 127.0.0.1 (OMNISERVE_EDGE_BIND), or set "
                "OMNISERVE_ALLOW_ANONYMOUS=1 if everybody there may use the device"
            )
        if not self.published_bind and not is_loopback(self.operator_bind):
            raise ValueError(
                f"OMNISERVE_EDGE_OPERATOR_BIND: the operator listener stays on loopback, not {self.operator_bind}"
            )
        if not self.published_bind and not is_loopback(self.mesh_bind):
            raise ValueError(f"OMNISERVE_EDGE_MESH_BIND: the mesh listener stays on loopback, not {self.mesh_bind}")
        for host in self.operator_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"OMNISERVE_EDGE_OPERATOR_HOSTS: {host!r} is no host name")
        for origin in self.operator_origins:
            parts = urlsplit(origin)
            if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path or parts.query:
                raise ValueError(f"OMNISERVE_EDGE_OPERATOR_ORIGINS: {origin!r} is no origin, write http://host:port")
        collector = urlsplit(self.otlp_endpoint)
        if self.otlp_endpoint and (collector.scheme != "http" or not collector.hostname):
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_ENDPOINT: the front door speaks OTLP/gRPC to http://host:port only, not {self.otlp_endpoint!r}"
            )
        return self

    def checks_everybody(self) -> bool:
        """Return whether admission is asked about callers even while there are no keys: not everybody may ask for anything."""
        return not is_loopback(self.published_bind or self.bind) or self.anonymous_tier not in {"auto", "paid"}

    def has_keys(self) -> bool:
        """Return whether any API key is configured. Raises ValueError or ConfigError when that cannot be read."""
        if self.secret.get_secret_value():
            return True
        try:
            made = keyring.read(keyring.keyring_path(self.state_dir))
        except keyring.KeyringError as error:
            raise ValueError(str(error)) from error
        return bool(made) or bool(keyring.keys_in(read(self.config)))


def is_loopback(bind: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"
