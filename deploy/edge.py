"""Renders the front door's static configuration: `python -m deploy.edge` writes <state>/envoy from the settings.

Rendering is pure; only `write` touches the disk. Envoy and its wrapper (envoy/run.sh) read what is written here, so
neither needs Python; relay reads what routes must know of the listeners.
"""

import json
import os
import re
import ssl
import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from deploy.edge_settings import EdgeSettings
from deploy.replies import gate_reply_config, local_reply_config
from deploy.template import fill
from services.kit.access import EDGE_OPERATOR, EDGE_PUBLIC
from services.kit.settings import SettingsError, load
from services.kit.tokens import ensure_token
from services.kit.wire.callouts import beside
from services.kit.yaml_text import Node, to_text

ROOT: Final = Path(__file__).resolve().parents[1]
TEMPLATE: Final = ROOT / "envoy" / "envoy.yaml"
EDGE: Final = "envoy"
"""Whose token Envoy shows when it asks admission on its own account."""
XDS: Final = "xds"
"""Folder of relay's files below the state directory."""
RETRIES_A_SECOND: Final = 4
"""Envoy waits for up to half a second before each, a random part of it."""
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")
# Where systems keep the authorities that they trust, most common first.
_AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
)


def render(template: str, settings: EdgeSettings) -> str:
    """Return Envoy's configuration as YAML. Raises TemplateError when template and settings do not fit."""
    return to_text(fill(template, _values(settings)))


def wrapper_variables(settings: EdgeSettings) -> str:
    """Return what envoy/run.sh reads: shell assignments of numbers."""
    values = {
        "ADMIN_PORT": settings.admin_port,
        "DRAIN_NOTICE_S": settings.drain_notice_s,
        "DRAIN_LIMIT_S": settings.drain_limit_s,
        "WORKERS": settings.workers,
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())


def facts(settings: EdgeSettings, *, ca: str) -> str:
    """Return what relay must know to render routes, as JSON. `ca`: file of the authorities that the system trusts."""
    known = {
        "operator_hosts": [*_LOOPBACK_HOSTS, *settings.operator_hosts],
        "operator_origins": _origins(settings),
        "body_limit_mib": settings.body_limit_mib,
        "stream_idle_timeout_s": settings.stream_idle_timeout_s,
        "checks_everybody": settings.checks_everybody(),
        "hold_retries": settings.hold_s * RETRIES_A_SECOND,
        "ca": ca,
        "envoy": settings.envoy or "envoy",
    }
    return json.dumps(known, indent=1) + "\n"


def system_authorities() -> str:
    """Return the file of the authorities that the system trusts; the most common one where there is none."""
    own = ssl.get_default_verify_paths().cafile
    return next((path for path in (*_AUTHORITIES, own) if path and Path(path).is_file()), _AUTHORITIES[0])


def write(settings: EdgeSettings) -> Path:
    """Write <state>/envoy/ (envoy.yaml, edge.env, door.json), each moved into place whole; return envoy.yaml's path."""
    folder = settings.state_dir / "envoy"
    folder.mkdir(parents=True, exist_ok=True)
    (settings.state_dir / "logs").mkdir(exist_ok=True)
    _replace(folder / "edge.env", wrapper_variables(settings))
    _replace(folder / "door.json", facts(settings, ca=system_authorities()))
    path = folder / "envoy.yaml"
    _replace(path, render(TEMPLATE.read_text(encoding="utf-8"), settings))
    return path


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _values(settings: EdgeSettings) -> dict[str, Node]:
    checks = settings.admission_checks_address or beside(settings.admission_address)
    return {
        "PORT": settings.port,
        "BIND": settings.bind,
        "OPERATOR_PORT": settings.operator_port,
        "OPERATOR_BIND": settings.operator_bind,
        "MESH_PORT": settings.mesh_port,
        "MESH_BIND": settings.mesh_bind,
        "XDS_DIR": str(settings.state_dir.resolve() / XDS),
        "ADMIN_PORT": settings.admin_port,
        "MAX_CONNECTIONS": settings.max_connections,
        "HOLD_RETRIES": settings.hold_s * RETRIES_A_SECOND,
        "STREAM_IDLE_TIMEOUT": f"{settings.stream_idle_timeout_s}s",
        "ACCESS_LOG": str(settings.state_dir.resolve() / "logs" / "access.log"),
        "LOCAL_REPLIES": local_reply_config(),
        "GATE_REPLIES": gate_reply_config(),
        "FACADE_ENDPOINTS": _endpoints("facade", settings.facade_address),
        "LLM_ENDPOINTS": _endpoints("llm", settings.llm_address),
        "DIFFUSION_ENDPOINTS": _endpoints("diffusion", settings.diffusion_address),
        "ADMISSION_ENDPOINTS": _endpoints("admission", settings.admission_address),
        "ADMISSION_CHECKS_ENDPOINTS": _endpoints("admission_checks", checks),
        "IDENTITY_ENDPOINTS": _endpoints("identity", checks),
        "VRAM_ENDPOINTS": _endpoints("vram", settings.vram_address),
        "RELAY_ENDPOINTS": _endpoints("relay", settings.relay_address),
        "ADMIN_ENDPOINTS": _endpoints("envoy_admin", f"127.0.0.1:{settings.admin_port}"),
        "GATE_TRACES": {"exact": "traceparent"} if settings.otlp_endpoint else None,
        "TRACING": _tracing(settings.traced_percent) if settings.otlp_endpoint else None,
        "COLLECTOR_ENDPOINTS": _collector(settings.otlp_endpoint),
    }


def _origins(settings: EdgeSettings) -> str:
    own = [f"http://{host}:{settings.operator_port}" for host in (*_LOOPBACK_HOSTS, *settings.operator_hosts)]
    return "|".join(re.escape(origin) for origin in (*own, *settings.operator_origins))


def _endpoints(cluster: str, address: str) -> Node:
    host, _, port = address.rpartition(":")
    where: Node = {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": where}}]}]}


def _collector(endpoint: str) -> Node:
    """Return the collector's endpoints; without tracing the cluster stays, unused, so that the template is one piece."""
    parts = urlsplit(endpoint or "http://127.0.0.1:4317")
    return _endpoints("collector", f"{parts.hostname}:{parts.port or 4317}")


def _tracing(percent: float) -> Node:
    """Return the connection managers' tracing of so many requests, and of those whose caller says so in its traceparent.

    Envoy's own share (random_sampling) would apply to the latter too. The URL tag is cut to nothing: Envoy would put the query
    string into it.
    """
    share: Node = {"numerator": round(percent * 10_000), "denominator": "MILLION"}
    return {
        "spawn_upstream_span": True,
        "max_path_tag_length": 0,
        "custom_tags": [{"tag": "url.path", "value": "%PATH(NQ:ORIG_OR_PATH)%"}],
        "provider": {
            "name": "envoy.tracers.opentelemetry",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
                "grpc_service": {"envoy_grpc": {"cluster_name": "collector"}, "timeout": "1s"},
                "service_name": "envoy",
                "sampler": _sampler(
                    "parent_based",
                    "ParentBased",
                    wrapped_sampler=_sampler("trace_id_ratio_based", "TraceIdRatioBased", sampling_percentage=share),
                ),
            },
        },
    }


def _sampler(name: str, kind: str, **config: Node) -> Node:
    extension = f"type.googleapis.com/envoy.extensions.tracers.opentelemetry.samplers.v3.{kind}SamplerConfig"
    return {"name": f"envoy.tracers.opentelemetry.samplers.{name}", "typed_config": {"@type": extension, **config}}


def main() -> int:
    """Write the configuration and the listeners' tokens; return the exit status."""
    try:
        settings = load(EdgeSettings)
    except SettingsError as error:
        sys.stderr.writelines(f"edge: {problem}\n" for problem in error.problems)
        return 2
    for token in (EDGE_PUBLIC, EDGE_OPERATOR, EDGE):
        ensure_token(settings.state_dir, token)
    print(write(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
