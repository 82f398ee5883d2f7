"""What Forward sends to a route: its path, its headers, and what of it is refused. Pure."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.kit.errors import DomainError, Reason
from services.relay.core.planning import PlannedRoute, Target
from services.relay.core.routes import ANY_METHOD

MIB: Final = 1024 * 1024
PIECE_BYTES: Final = MIB
"""Largest piece of a body in one message."""

_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_VARIABLE: Final = re.compile(r"\{[a-z_]+\}")
_PRINCIPAL: Final = re.compile(r"[\x21-\x7e]{0,128}")
_QUERY: Final = re.compile(r"[\x21\x22\x24-\x7e]*")
_REST: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")
_HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    }
)
_CREDENTIALS: Final = frozenset(
    {"authorization", "x-api-key", "x-rapid-api-key", "secret", "cookie", "proxy-authorization"}
)
_OURS: Final = frozenset({"host", "content-length", "expect", "x-request-id"})
_CLOSED: Final = _HOP_BY_HOP | _CREDENTIALS | _OURS
_PREFIXES: Final = ("x-omniserve-", "x-om-", "x-envoy-")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request for a route. `target`: path and query. `limit_bytes`: largest body. `may_wait` False: for a permit at once or never."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    limit_bytes: int
    body_bytes: int | None
    may_wait: bool = True


def principal_of(said: str, caller: str, *, is_believed: bool) -> str:
    """Return whom the work is booked for: whom the caller says, if it is believed about that. Raises DomainError."""
    if not _PRINCIPAL.fullmatch(said):
        raise _invalid("a principal has at most 128 printable characters without spaces", "head.principal")
    return said if said and is_believed else caller


def outgoing(
    planned: PlannedRoute,
    *,
    query: str,
    path_rest: str,
    headers: Iterable[tuple[str, str]],
    body_bytes: int | None,
    may_wait: bool = True,
) -> Outgoing:
    """Return the request. Raises DomainError: not_found (nothing serves it), invalid_request, too_large."""
    backing = _served(planned)
    limit_bytes = backing * MIB
    if body_bytes is not None and body_bytes > limit_bytes:
        raise too_large(body_bytes, backing)
    if not _QUERY.fullmatch(query):
        raise _invalid("the query must be printable ASCII without spaces and #", "head.query")
    path = _path(planned, path_rest)
    return Outgoing(
        method="POST" if planned.spec.method == ANY_METHOD else planned.spec.method,
        target=f"{path}?{query}" if query else path,
        headers=tuple(_checked(name, value) for name, value in headers),
        limit_bytes=limit_bytes,
        body_bytes=body_bytes,
        may_wait=may_wait,
    )


def _served(planned: PlannedRoute) -> int:
    """Return the largest body of the upstream, MiB. Raises DomainError not_found when no worker serves the route."""
    spec = planned.spec
    if planned.target is Target.DISABLED:
        hint = f"set {spec.enabling_setting} to enable it" if spec.enabling_setting else "no worker can serve it"
        raise DomainError(Reason.NOT_FOUND, f"nothing is configured for {spec.route_id}: {hint}", field="head.route_id")
    if planned.target is Target.EMBEDDED:
        message = f"{spec.route_id} is served by a service of the mesh, which is called directly"
        raise DomainError(Reason.NOT_FOUND, message, field="head.route_id")
    return planned.proxied.upstream.max_body_mib


def _path(planned: PlannedRoute, rest: str) -> str:
    """Return the public path with its open part filled in."""
    path = planned.spec.path
    if any(part in (".", "..") for part in rest.split("/")) or not _REST.fullmatch(rest) or "//" in rest:
        raise _invalid(
            "the rest of the path must hold plain characters, and no empty, . or .. segments", "head.path_rest"
        )
    if path.endswith("*"):
        return path[:-1] + rest.removeprefix("/")
    if _VARIABLE.search(path):
        if not rest or "/" in rest:
            raise _invalid(f"{path} wants one segment in path_rest", "head.path_rest")
        return _VARIABLE.sub(lambda _: rest, path, count=1)
    if rest:
        raise _invalid(f"{path} has no rest", "head.path_rest")
    return path


def _checked(name: str, value: str) -> tuple[str, str]:
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise _invalid(f"header {name[:64]!r} is none: names in lower case, values on one line", "head.headers")
    if name in _CLOSED or name.startswith(_PREFIXES):
        raise _invalid(f"header {name} is not passed on", "head.headers")
    return name, value


def too_large(body_bytes: int, limit_mib: int) -> DomainError:
    """Return the refusal of a body."""
    message = f"the body has {body_bytes} bytes or more; the route takes {limit_mib} MiB"
    return DomainError(Reason.TOO_LARGE, message, field="body")


def passed_on(headers: Iterable[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return a worker's headers without those of the connection."""
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP]


def refusal(body: bytes, request_id: str, retry_after: str) -> DomainError | None:
    """Return the mesh's own refusal that an answer's body tells, None for a worker's word.

    The mesh names the request by the id that relay gave it, and a reason that callers know.
    """
    try:
        error = json.loads(body)["error"]
        reason, message, told_id = Reason(error["reason"]), str(error["message"]), error["request_id"]
    except (ValueError, KeyError, TypeError):
        return None
    if told_id != request_id:
        return None
    seconds = int(retry_after) if retry_after.isdecimal() else None
    return DomainError(reason, message, retry_after_ms=None if seconds is None else seconds * 1000)


def _invalid(message: str, field: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, message, field=field)
