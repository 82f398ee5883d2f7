"""Envoy's ext_authz: who calls, at which tier. One short answer for every request, so what can be is made beforehand."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from envoy_subset import ext_authz_pb2 as pb
from google.protobuf.message import DecodeError

from services.admission.adapters.keys import KeyFiles, Keys
from services.admission.core import identity
from services.admission.core.identity import Allowed, Denied, Policy, Verdict
from services.kit.access import CLIENT_KEY, EDGE_OPERATOR, EDGE_PUBLIC, REQUEST_ID_KEY, TIER_KEY
from services.kit.errors import STATUS, Reason
from services.kit.keyring import digest
from services.kit.tokens import TokenBook

SERVICE: Final = "envoy.service.auth.v3.Authorization"
SERVICE_TOKEN: Final = "x-om-service-token"  # noqa: S105 - the name of a header
"""Where the mesh listener keeps the token that the caller sent as x-omniserve-service-token."""
_FOR_CLIENT: Final = "x-om-client"
"""Where it keeps x-omniserve-client: whom the caller works for."""
_ASKED_TIER: Final = "x-om-asked-tier"
_GONE: Final = (*identity.KEY_HEADERS, _ASKED_TIER, SERVICE_TOKEN, _FOR_CLIENT)
"""Headers that end here: credentials, and what the listener put aside for us."""
# Who has a token without being a service: nobody on the mesh listener.
_OUTSIDERS: Final = frozenset({EDGE_PUBLIC, EDGE_OPERATOR, "cli", "envoy"})
# Services that are believed about whom they work for; relay passes on only what it believed itself.
_SPEAK_FOR_CLIENTS: Final = frozenset({"facade", "jobs", "relay"})
_PUBLIC: Final = "public"
_OPERATOR: Final = "operator"
_MESH: Final = "mesh"
_OVERWRITE: Final = pb.HeaderValueOption.APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD
# Clients times tiers; more than this are not kept.
_MOST_READY: Final = 10_000
_NOTHING_READY: Final = (b"", -math.inf)
_Case = tuple[str, str, str, str]
"""What an answer depends on: the listener, what is shown, the asked tier, whom a service says it works for."""


@dataclass(frozen=True, slots=True)
class _Http:
    status: int
    type: str


_HTTP: Final = {
    Reason.INVALID_REQUEST: _Http(400, "invalid_request_error"),
    Reason.UNAUTHENTICATED: _Http(401, "authentication_error"),
    Reason.FORBIDDEN: _Http(403, "permission_error"),
}


class Authorizer:
    """Answers Envoy's checks. `wall` gives seconds since 1970."""

    def __init__(self, files: KeyFiles, tokens: TokenBook, policy: Policy, wall: Callable[[], float]) -> None:
        self._files = files
        self._tokens = tokens
        self._policy = policy
        self._operator_sha256 = digest(policy.operator_token) if policy.operator_token else ""
        self._wall = wall
        self._ready: dict[_Case, tuple[bytes, float]] = {}
        self._adopt(files.keys)

    def answer(self, question: bytes) -> bytes:
        """Return the CheckResponse to a CheckRequest, both serialised."""
        try:
            attributes = pb.CheckRequest.FromString(question).attributes
        except DecodeError:
            return _UNREADABLE
        if self._keys is not self._files.keys:
            self._adopt(self._files.keys)
        http = attributes.request.http
        headers, path = http.headers, http.path
        door = attributes.context_extensions.get("listener", _PUBLIC)
        proof = self._proof(door, headers, path)
        client = headers.get(_FOR_CLIENT, "") if door == _MESH and proof in _SPEAK_FOR_CLIENTS else ""
        case = (door, proof, headers.get(TIER_KEY, ""), client)
        answer, until = self._ready.get(case, _NOTHING_READY)
        if self._wall() < until:
            return answer
        verdict = self._judge(case)
        if isinstance(verdict, Denied):
            return denied(verdict, headers.get(REQUEST_ID_KEY, ""), headers.get("content-type", ""))
        return self._prepare(case, verdict)

    def _proof(self, door: str, headers: Any, path: str) -> str:  # noqa: ANN401 - a protobuf map
        """Return what the request shows: the digest of a key, or on the mesh listener the service; "" for nothing."""
        if door == _MESH:
            token = headers.get(SERVICE_TOKEN, "")
            return (self._tokens.service_of(token) or "") if token else ""
        is_operator = door == _OPERATOR
        key = identity.bearer(headers.get("authorization", "")) if is_operator else identity.shown_key(headers, path)
        return digest(key) if key else ""

    def _judge(self, case: _Case) -> Verdict:
        door, proof, asked, client = case
        if door == _MESH:
            return identity.judge_mesh(proof, asked, _OUTSIDERS, client)
        if door == _OPERATOR:
            return identity.judge_operator(proof, asked, self._operator_sha256)
        verdict = self._judge_public(proof, asked)
        if proof and isinstance(verdict, Denied) and self._files.refresh():  # a key that was made just now
            self._adopt(self._files.keys)
            return self._judge_public(proof, asked)
        return verdict

    def _judge_public(self, sha256: str, asked: str) -> Verdict:
        return identity.judge_public(sha256, asked, self._keys.book, self._anonymous, self._wall())

    def _prepare(self, case: _Case, verdict: Allowed) -> bytes:
        """Return the answer to a case, and keep it for the next one, for as long as its key lasts."""
        door, proof, *_ = case
        key = self._keys.book.keys.get(proof) if door not in (_MESH, _OPERATOR) else None
        until = math.inf if key is None or key.expires is None else key.expires
        answer = allowed(verdict)
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        self._ready[case] = answer, until
        return answer

    def _adopt(self, keys: Keys) -> None:
        self._keys = keys
        self._anonymous = self._policy.anonymous(has_keys=keys.has_keys)
        self._ready.clear()


def allowed(verdict: Allowed) -> bytes:
    """Return the answer that lets a request in, serialised. A key in the query is the front door's to remove."""
    headers = ((CLIENT_KEY, verdict.client), (TIER_KEY, verdict.tier.name.lower()))
    ok = pb.OkHttpResponse(
        headers=[_header(key, value) for key, value in headers],
        headers_to_remove=_GONE,
    )
    return pb.CheckResponse(status=pb.RpcStatus(code=0), ok_response=ok).SerializeToString()


def denied(verdict: Denied, request_id: str, content_type: str) -> bytes:
    """Return the refusal, serialised: OpenAI's error shape, or for a gRPC caller the sentence and the status code."""
    http = _HTTP[verdict.reason]
    code: int = STATUS[verdict.reason].value[0]
    if content_type.lower().startswith("application/grpc"):
        headers = [_header("grpc-status", str(code))]  # Envoy would make its own of the HTTP status
        body = verdict.message
    else:
        headers = [_header("content-type", "application/json")]
        body = _error(verdict, http, request_id)
    if verdict.reason is Reason.UNAUTHENTICATED:
        headers.append(_header("www-authenticate", 'Bearer realm="omniserve"'))
    response = pb.DeniedHttpResponse(status=pb.HttpStatus(code=http.status), headers=headers, body=body)
    status = pb.RpcStatus(code=code, message=verdict.message)
    return pb.CheckResponse(status=status, denied_response=response).SerializeToString()


def _error(verdict: Denied, http: _Http, request_id: str) -> str:
    error = {
        "message": f"{verdict.message[:1].upper()}{verdict.message[1:]}.",
        "type": http.type,
        "param": None,
        "code": verdict.reason.value,
        "reason": verdict.reason.value,
        "request_id": request_id,
    }
    return json.dumps({"error": error})


def _header(key: str, value: str) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(header=pb.HeaderValue(key=key, value=value), append_action=_OVERWRITE)


# Envoy cleans what is no text; should it ever not, one caller's bytes must not become everybody's trouble.
_UNREADABLE: Final = denied(Denied(Reason.INVALID_REQUEST, "the request's head is no text"), "", "")
