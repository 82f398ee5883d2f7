"""Envoy's ext_authz: who calls, at which tier. One short answer for every request, so what can be is made beforehand."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from envoy_subset import ext_authz_pb2 as pb
from google.protobuf.message import DecodeError

from services.admission.adapters.keys import KeyFiles, Keys
from services.admission.core import identity
from services.admission.core.identity import Allowed, Denied, Listener, Policy, Verdict
from services.kit.access import CLIENT_KEY, EDGE_OPERATOR, EDGE_PUBLIC, REQUEST_ID_KEY, TIER_KEY
from services.kit.errors import STATUS, Reason
from services.kit.keyring import digest
from services.kit.tokens import TokenBook

SERVICE: Final = "envoy.service.auth.v3.Authorization"
SERVICE_TOKEN: Final = "x-om-service-token"  # noqa: S105 - the name of a header
"""Where the mesh listener keeps the token that the caller sent as x-omniserve-service-token."""
_ASKED_TIER: Final = "x-om-asked-tier"
_GONE: Final = (*identity.KEY_HEADERS, _ASKED_TIER, SERVICE_TOKEN)
"""Headers that end here: credentials, and what the listener put aside for us."""
# Who has a token without being a service: nobody on the mesh listener.
_OUTSIDERS: Final = frozenset({EDGE_PUBLIC, EDGE_OPERATOR, "cli", "envoy"})
_LISTENERS: Final = {listener.value: listener for listener in Listener}
_OVERWRITE: Final = pb.HeaderValueOption.APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD
# Clients times tiers, with and without a query secret. More than this are made anew each time.
_MOST_READY: Final = 10_000


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
        self._ready: dict[tuple[Allowed, bool], bytes] = {}
        self._adopt(files.keys)

    def answer(self, question: bytes) -> bytes:
        """Return the CheckResponse to a CheckRequest, both serialised."""
        try:
            attributes = pb.CheckRequest.FromString(question).attributes
        except DecodeError:
            return _UNREADABLE
        http = attributes.request.http
        headers = http.headers
        listener = _LISTENERS.get(attributes.context_extensions.get("listener", ""), Listener.PUBLIC)
        verdict = self._judge(listener, headers, http.path)
        if isinstance(verdict, Denied):
            return denied(verdict, headers.get(REQUEST_ID_KEY, ""), headers.get("content-type", ""))
        ticket = (verdict, bool(identity.query_secrets(http.path)))
        answer = self._ready.get(ticket)
        if answer is None:
            answer = allowed(*ticket)
            if len(self._ready) < _MOST_READY:
                self._ready[ticket] = answer
        return answer

    def _judge(self, listener: Listener, headers: Any, path: str) -> Verdict:  # noqa: ANN401 - a protobuf map
        asked = headers.get(TIER_KEY, "")
        match listener:
            case Listener.OPERATOR:
                shown = identity.bearer(headers.get("authorization", ""))
                return identity.judge_operator(shown, asked, self._operator_sha256)
            case Listener.MESH:
                token = headers.get(SERVICE_TOKEN, "")
                service = self._tokens.service_of(token) if token else None
                return identity.judge_mesh(service, asked, _OUTSIDERS)
            case Listener.PUBLIC:
                return self._judge_public(identity.shown_key(headers, path), asked)

    def _judge_public(self, key: str | None, asked: str) -> Verdict:
        if self._keys is not self._files.keys:
            self._adopt(self._files.keys)
        verdict = identity.judge_public(key, asked, self._keys.book, self._anonymous, self._wall())
        if key is not None and isinstance(verdict, Denied) and self._files.refresh():  # a key that was made just now
            self._adopt(self._files.keys)
            verdict = identity.judge_public(key, asked, self._keys.book, self._anonymous, self._wall())
        return verdict

    def _adopt(self, keys: Keys) -> None:
        self._keys = keys
        self._anonymous = self._policy.anonymous(has_keys=keys.has_keys)
        self._ready.clear()


def allowed(verdict: Allowed, has_query_secret: bool) -> bytes:  # noqa: FBT001 - a fact about the request
    """Return the answer that lets a request in, serialised."""
    headers = ((CLIENT_KEY, verdict.client), (TIER_KEY, verdict.tier.name.lower()))
    ok = pb.OkHttpResponse(
        headers=[_header(key, value) for key, value in headers],
        headers_to_remove=_GONE,
        query_parameters_to_remove=[identity.SECRET_PARAMETER] if has_query_secret else [],
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
