"""What every request passes: who calls and for whom, its id, its span, and the last word on errors."""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from facade.errors import UNEXPECTED, error_response
from services.kit import context, telemetry
from services.kit.access import (
    CLI,
    CLIENT_KEY,
    DEFAULT_TIER,
    EDGE_OPERATOR,
    EDGE_PUBLIC,
    MODE_KEY,
    REQUEST_ID_KEY,
    TIER_KEY,
    TIERS,
    TOKEN_KEY,
    TRACEPARENT_KEY,
)
from services.kit.errors import DomainError, Reason
from services.kit.tokens import TokenBook

_log = telemetry.logger(__name__)

# Only these speak for clients here; a service of the mesh calls services over gRPC.
_CALLERS: Final = frozenset({EDGE_PUBLIC, EDGE_OPERATOR, CLI})
_OPERATORS: Final = frozenset({EDGE_OPERATOR, CLI})
# Asked by process managers, which have no token.
_OPEN_PATHS: Final = frozenset({"/health", "/readyz"})
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_CALLER_LEFT: Final = 499


@dataclass(frozen=True, slots=True)
class Principal:
    """For whom a request is, as the front door says. `is_operator`: it came in by the operator's listener.

    `may_leave`: somebody else serves what we cannot take at once.
    """

    client: str
    tier: str
    request_id: str
    traceparent: str
    is_operator: bool = False
    may_leave: bool = False


def principal_of(scope: Scope) -> Principal:
    """Return for whom the request of a scope is."""
    principal: Principal = scope["omniserve.principal"]
    return principal


def operator_of(scope: Scope) -> Principal:
    """Return for whom the request of a scope is, who must be the operator.

    Raises DomainError `not_found`, as the front door says it: nobody else learns that there is anything.
    """
    principal = principal_of(scope)
    if not principal.is_operator:
        raise DomainError(Reason.NOT_FOUND, "Not found. Operator routes are on the operator listener only.")
    return principal


class Door:
    """ASGI middleware around everything. `book` None believes every caller.

    It makes the span itself: the OpenTelemetry package's middleware works on every message that is sent, and a stream
    sends one for each piece of its text.
    """

    def __init__(self, app: ASGIApp, *, book: TokenBook | None) -> None:
        self._app = app
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        given = headers.get(REQUEST_ID_KEY, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        tell = _Telling(send, request_id)
        if not telemetry.tracing() or scope["path"] in _OPEN_PATHS:
            given = headers.get(TRACEPARENT_KEY, "")
            visit = _Visit(headers, request_id, given if _TRACEPARENT.fullmatch(given) else "")
            await self._serve(visit, scope, receive, tell)
            return
        with telemetry.tracer(__name__).start_as_current_span(
            scope["method"], context=extract(headers), kind=trace.SpanKind.SERVER, attributes=_attributes(scope)
        ) as span:
            carrier: dict[str, str] = {}
            inject(carrier)
            visit = _Visit(headers, request_id, carrier.get(TRACEPARENT_KEY, ""))
            await self._serve(visit, scope, receive, tell)
            _describe(span, scope, tell.status or _CALLER_LEFT)

    async def _serve(self, visit: "_Visit", scope: Scope, receive: Receive, tell: "_Telling") -> None:
        tell.traceparent = visit.traceparent.encode()
        context.set_current_request(context.Request(visit.request_id, visit.traceparent or None))
        try:
            caller = "" if scope["path"] in _OPEN_PATHS else self._check(visit.headers)
            scope["omniserve.principal"] = _principal(visit, is_operator=caller in _OPERATORS)
            await self._app(scope, receive, tell)
        except DomainError as refused:
            error = refused
        except Exception:
            _log.exception("unexpected error", method=scope["method"], path=scope["path"])
            if tell.status:
                raise  # part of an answer is out: the server cuts the connection
            error = DomainError(Reason.INTERNAL, UNEXPECTED)
        else:
            return
        await error_response(error, visit.request_id, scope["path"])(scope, receive, tell)

    def _check(self, headers: Mapping[str, str]) -> str:
        """Return which part of the front door calls. Raises DomainError."""
        if self._book is None:
            return CLI
        token = headers.get(TOKEN_KEY)
        if not token:
            raise DomainError(
                Reason.UNAUTHENTICATED, f"Only the front door calls here: the header {TOKEN_KEY} is missing."
            )
        caller = self._book.service_of(token)
        if caller not in _CALLERS:
            raise DomainError(
                Reason.UNAUTHENTICATED, f"Only the front door calls here: the token in {TOKEN_KEY} is not its."
            )
        return caller


@dataclass(frozen=True, slots=True)
class _Visit:
    """What the headers of one request say. `traceparent`: of our own span if there is one; "" for none."""

    headers: Mapping[str, str]
    request_id: str
    traceparent: str


class _Telling:
    """Puts the ids of the request and its trace on the response and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self.traceparent = b""
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            message["headers"] = [*headers, (b"traceparent", self.traceparent)] if self.traceparent else headers
        await self._send(message)


def _headers(scope: Scope) -> dict[str, str]:
    """Return the first value of each header: what the front door put there wins over what came later."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


def _principal(visit: _Visit, *, is_operator: bool) -> Principal:
    tier = visit.headers.get(TIER_KEY, "").strip().lower() or DEFAULT_TIER
    if tier not in TIERS:
        raise DomainError(Reason.INVALID_REQUEST, f"'{TIER_KEY}' is none of {', '.join(TIERS)}", field=TIER_KEY)
    client = visit.headers.get(CLIENT_KEY) or "anonymous"
    may_leave = visit.headers.get(MODE_KEY) == "try"
    return Principal(client, tier, visit.request_id, visit.traceparent, is_operator, may_leave)


def _attributes(scope: Scope) -> dict[str, str]:
    return {"http.request.method": scope["method"], "url.path": scope["path"]}


def _describe(span: trace.Span, scope: Scope, status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)
