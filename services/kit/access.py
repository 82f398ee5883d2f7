"""Who may call which RPC: read from the contracts, checked before a handler runs.

Every RPC declares its audience in the proto (`omniserve.options.v1.access`); every caller shows a service token. What
the caller says about its own client (principal, tier) is believed only from those whose business that is.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

from omniserve.options.v1 import options_pb2
from services.kit.context import Request, set_current_request
from services.kit.errors import DomainError, Reason
from services.kit.handlers import Context, Handler, refusing_handler
from services.kit.tokens import TokenBook

TOKEN_KEY: Final = "x-omniserve-service-token"  # noqa: S105 - the name of a header
CLIENT_KEY: Final = "x-omniserve-client"
TIER_KEY: Final = "x-omniserve-tier"
MODE_KEY: Final = "x-omniserve-mode"
"""`try`: another group serves what cannot be taken at once; only the front door says so."""
REQUEST_ID_KEY: Final = "x-request-id"
TRACEPARENT_KEY: Final = "traceparent"

TIERS: Final = ("paid", "sub", "free", "background")
DEFAULT_TIER: Final = "free"

EDGE_PUBLIC: Final = "envoy-public"
EDGE_OPERATOR: Final = "envoy-operator"
CLI: Final = "cli"
# Callers that are no service of the mesh, with the widest audience each may reach.
_OUTSIDE: Final[Mapping[str, int]] = {
    EDGE_PUBLIC: options_pb2.AUDIENCE_PUBLIC,
    EDGE_OPERATOR: options_pb2.AUDIENCE_OPERATOR,
    CLI: options_pb2.AUDIENCE_OPERATOR,
}
# Callers that speak for somebody else: they alone say which client and tier a request belongs to.
_SPEAKS_FOR_CLIENTS: Final = frozenset({EDGE_PUBLIC, EDGE_OPERATOR, "facade", "jobs"})

_UNCHECKED: Final = "unchecked"

# Probes carry no token; reflection shows contracts to anybody who has one.
OPEN_SERVICES: Final = frozenset({"grpc.health.v1.Health"})
_ANY_TOKEN_SERVICES: Final = frozenset(
    {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
)
BUILT_IN_SERVICES: Final = OPEN_SERVICES | _ANY_TOKEN_SERVICES

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Caller(NamedTuple):
    """Who calls. `service` is proven by its token; `client` and `tier` are the ones it may speak for."""

    service: str
    client: str
    tier: str
    request_id: str

    @property
    def speaks_for_clients(self) -> bool:
        """Return whether it is believed about whom the work is for."""
        return self.service in _SPEAKS_FOR_CLIENTS or self.service == _UNCHECKED


@dataclass(frozen=True, slots=True)
class Access:
    """The rule of one RPC: the widest audience, and for MESH the services that may call (empty: all)."""

    audience: int
    callers: frozenset[str] = frozenset()


class AccessRulesMissingError(Exception):
    """RPCs without `option (omniserve.options.v1.access)`; the server must not start."""


_caller: ContextVar[Caller | None] = ContextVar("omniserve_caller", default=None)


def caller_of(context: Context) -> Caller:  # noqa: ARG001 - one RPC per task, so the task knows
    """Return who called the RPC that is being served. Raises LookupError outside an RPC."""
    caller = _caller.get()
    if caller is None:
        raise LookupError("no RPC is being served by this task, or the server was built without access checks")
    return caller


def rules_of(services: Iterable[str]) -> dict[str, Access]:
    """Return the rule of every RPC of the named services, by path (`/package.Service/Method`).

    Raises AccessRulesMissingError naming each RPC without a rule, and each service without a descriptor.
    """
    pool = descriptor_pool.Default()
    rules: dict[str, Access] = {}
    missing: list[str] = []
    for service in services:
        try:
            descriptor = pool.FindServiceByName(service)
        except KeyError:
            missing.append(f"{service} (unknown contract)")
            continue
        for method in descriptor.methods:
            access = method.GetOptions().Extensions[options_pb2.access]
            if access.audience == options_pb2.AUDIENCE_UNSPECIFIED:
                missing.append(f"{service}/{method.name}")
            rules[f"/{service}/{method.name}"] = Access(access.audience, frozenset(access.callers))
    if missing:
        raise AccessRulesMissingError(f"no option (omniserve.options.v1.access) on: {', '.join(missing)}")
    return rules


def refusal(rule: Access, service: str) -> str | None:
    """Return why the service may not call under the rule, or None when it may."""
    outside = _OUTSIDE.get(service)
    if outside is not None:
        if rule.audience <= outside:
            return None
        return f"{service} reaches {_audience(outside)} RPCs only, and this one is {_audience(rule.audience)}"
    if rule.audience == options_pb2.AUDIENCE_MESH and rule.callers and service not in rule.callers:
        return f"{service} is not among its callers: {', '.join(sorted(rule.callers))}"
    return None


def _audience(number: int) -> str:
    return options_pb2.Audience.Name(options_pb2.Audience.ValueType(number)).removeprefix("AUDIENCE_")


class AccessGuard:
    """Lets a call through when its token is known and the RPC's rule allows the caller; remembers the caller.

    Refuses with UNAUTHENTICATED `unauthenticated` (no token, unknown token) or PERMISSION_DENIED `forbidden`.
    `book` None believes everybody, as service "unchecked": for one person's development machine only.
    """

    def __init__(
        self,
        rules: Mapping[str, Access],
        book: TokenBook | None,
        *,
        new_id: Callable[[], str] = lambda: f"{random.getrandbits(128):032x}",
    ) -> None:
        self._rules = rules
        self._book = book
        self._new_id = new_id

    def guard(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Return the handler, or one that refuses."""
        path, metadata = details.method, _first_values(details.invocation_metadata)
        request = Request(self._request_id(metadata), _traceparent(metadata))
        set_current_request(request)
        contract = path.split("/")[1]
        if contract in OPEN_SERVICES:
            return handler
        try:
            _caller.set(self._admit(path, contract, metadata, request.request_id))
        except DomainError as error:
            return refusing_handler(handler, error)
        return handler

    def _admit(self, path: str, contract: str, metadata: Mapping[str, str], request_id: str) -> Caller:
        service = self._service(path, metadata.get(TOKEN_KEY))
        if self._book is not None and contract not in _ANY_TOKEN_SERVICES:
            rule = self._rules.get(path)
            why = refusal(rule, service) if rule is not None else "it has no access rule"
            if why is not None:
                raise DomainError(Reason.FORBIDDEN, f"{path} is closed to this caller: {why}")
        if service not in _SPEAKS_FOR_CLIENTS and self._book is not None:
            return Caller(service, service, DEFAULT_TIER, request_id)
        tier = metadata.get(TIER_KEY, "").strip().lower() or DEFAULT_TIER
        if tier not in TIERS:
            raise DomainError(
                Reason.INVALID_REQUEST, f"tier {tier[:40]!r} is none of {', '.join(TIERS)}", field=TIER_KEY
            )
        return Caller(service, metadata.get(CLIENT_KEY) or "anonymous", tier, request_id)

    def _service(self, path: str, token: str | None) -> str:
        if self._book is None:
            return _UNCHECKED
        if not token:
            raise DomainError(Reason.UNAUTHENTICATED, f"{path} wants a service token in the metadata {TOKEN_KEY}")
        service = self._book.service_of(token)
        if service is None:
            raise DomainError(Reason.UNAUTHENTICATED, f"the token in the metadata {TOKEN_KEY} belongs to no service")
        return service

    def _request_id(self, metadata: Mapping[str, str]) -> str:
        given = metadata.get(REQUEST_ID_KEY)
        return given if given is not None and _REQUEST_ID.fullmatch(given) else self._new_id()


def _first_values(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the first value of each key: what a proxy put in front wins over what a client appended."""
    values: dict[str, str] = {}
    for key, value in metadata or ():
        if isinstance(value, str):
            values.setdefault(key, value)
    return values


def _traceparent(metadata: Mapping[str, str]) -> str | None:
    given = metadata.get(TRACEPARENT_KEY)
    return given if given is not None and _TRACEPARENT.fullmatch(given) else None
