"""What the front door answers by itself, in OpenAI's error shape. Pure.

Envoy's own answers (no service answers, a malformed request, a refused path) must look like the facade's, so that a client
sees one kind of error. gRPC callers get the bare sentence, which Envoy puts into `grpc-message`.
"""

from dataclasses import dataclass

from services.kit.yaml_text import Node

_BODY = "%LOCAL_REPLY_BODY%"
_DETAILS = "%RESPONSE_CODE_DETAILS%"


@dataclass(frozen=True, slots=True)
class Reply:
    """One status: the constant reason, OpenAI's error type, and the sentence (Envoy's substitutions allowed)."""

    status: int
    reason: str
    type: str
    message: str
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"

REPLIES = (
    Reply(
        400,
        "invalid_request",
        _INVALID,
        f"The request is malformed, or its path or a header is not allowed ({_DETAILS}).",
    ),
    Reply(402, "payment_required", "permission_error", _BODY),
    Reply(403, "forbidden", "permission_error", _BODY),
    Reply(404, "not_found", _INVALID, _BODY),
    Reply(408, "invalid_request", _INVALID, f"The request did not arrive in time ({_DETAILS})."),
    Reply(413, "too_large", _INVALID, _BODY),
    Reply(415, "unsupported", _INVALID, _BODY),
    Reply(426, "unsupported", _INVALID, f"This HTTP version is not supported ({_DETAILS})."),
    Reply(429, "rate_limited", "rate_limit_error", f"Too many requests ({_DETAILS}).", retry_after_s=1),
    Reply(431, "invalid_request", _INVALID, f"The request headers are too large ({_DETAILS})."),
    Reply(500, "internal", _SERVER, f"The front door failed ({_DETAILS})."),
    Reply(502, "upstream_failed", _SERVER, f"The service behind this route broke off its answer ({_DETAILS})."),
    Reply(
        503,
        "no_capacity",
        _SERVER,
        f"The service behind this route does not answer; it may be starting or restarting ({_DETAILS}).",
        retry_after_s=1,
    ),
    Reply(504, "upstream_timeout", _SERVER, f"The service behind this route was silent for too long ({_DETAILS})."),
)
"""Every status that Envoy can answer by itself with this configuration."""


UNADMITTED = 591
"""What the gate's last route answers: the 503 of a request that admission said nothing about."""
_UNADMITTED = Reply(UNADMITTED, "admission_unavailable", _SERVER, _BODY, retry_after_s=1)
_UNCHECKED = Reply(
    503,
    "admission_unavailable",
    _SERVER,
    "Who calls cannot be checked: admission does not answer; it may be restarting.",
    retry_after_s=1,
)


def local_reply_config() -> Node:
    """Return Envoy's LocalReplyConfig: the first mapper that matches wins, so gRPC comes first."""
    healthy = _when(200, {"status": "ok"})  # /healthz is a local reply too
    unchecked = _flagged(_mapper(_UNCHECKED), ["UAEX"])
    mappers: list[Node] = [_grpc_mapper(), unchecked, _as_admission_said(), healthy]
    mappers += [_mapper(reply) for reply in REPLIES]
    return {"mappers": mappers, "body_format": {"json_format": _shape(_OTHER)}}


def gate_reply_config() -> Node:
    """Return what the gate answers by itself. Admission's own refusals come through it as they are."""
    unadmitted = {**_mapper(_UNADMITTED), "status_code": 503}
    broke = {**_flagged({**_mapper(_BROKE), **_only(503)}, ["UC", "UR", "LR", "UPE"]), "status_code": 502}
    # Envoy notes why it answers; a refusal that admission wrote has no such note.
    failed: list[Node] = [_flagged(_mapper(reply), []) for reply in REPLIES if reply.status in _GATES_OWN]
    return {"mappers": [unadmitted, broke, *failed]}


_BROKE = next(reply for reply in REPLIES if reply.reason == "upstream_failed")
# Of a worker that does not answer, breaks off, or takes too long.
_GATES_OWN = frozenset({502, 503, 504})
_OTHER = Reply(0, "internal", _SERVER, f"The front door answered {_DETAILS}.")


def _grpc_mapper() -> Node:
    is_grpc: Node = {"name": "content-type", "string_match": {"prefix": "application/grpc", "ignore_case": True}}
    return {
        "filter": {"header_filter": {"header": is_grpc}},
        "body_format_override": {"text_format_source": {"inline_string": _BODY}},
    }


def _as_admission_said() -> Node:
    """Return the mapper for callers whom admission turned away: its own words, which have the right shape."""
    return {
        "filter": {"response_flag_filter": {"flags": ["UAEX"]}},
        "body_format_override": {
            "text_format_source": {"inline_string": _BODY},
            "content_type": "application/json",
        },
    }


def _flagged(mapper: dict[str, Node], flags: list[Node]) -> dict[str, Node]:
    """Return the mapper for answers that have one of Envoy's response flags; for any flag when none is named."""
    both: list[Node] = [mapper["filter"], {"response_flag_filter": {"flags": flags}}]
    return {**mapper, "filter": {"and_filter": {"filters": both}}}


def _mapper(reply: Reply) -> dict[str, Node]:
    mapper = _when(reply.status, _shape(reply))
    if reply.retry_after_s is not None:
        header: Node = {"key": "retry-after", "value": str(reply.retry_after_s)}
        mapper["headers_to_add"] = [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    return mapper


def _when(status: int, body: Node) -> dict[str, Node]:
    return {**_only(status), "body_format_override": {"json_format": body}}


def _only(status: int) -> dict[str, Node]:
    compared: Node = {"op": "EQ", "value": {"default_value": status, "runtime_key": "omniserve.local_reply"}}
    return {"filter": {"status_code_filter": {"comparison": compared}}}


def _shape(reply: Reply) -> Node:
    error: dict[str, Node] = {
        "message": reply.message,
        "type": reply.type,
        "param": None,
        "code": reply.reason,
        "reason": reply.reason,
        "request_id": "%REQ(x-request-id)%",
    }
    if reply.retry_after_s is not None:
        error["retry_after_ms"] = reply.retry_after_s * 1000
    return {"error": error}
