"""The one table from reasons to HTTP, and the one shape in which errors are told."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import orjson
from starlette.responses import Response

from facade.translate.anthropic_answers import anthropic_error
from services.kit import telemetry
from services.kit.errors import DomainError, Reason

_log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Http:
    """How a reason looks in HTTP: the status, OpenAI's type, and when to come back if the error itself does not say."""

    status: int
    type: str
    retry_after_ms: int | None = None


_ANTHROPIC_PATHS: Final = "/v1/messages"
UNEXPECTED: Final = "An unexpected error; the log has it by the request id."

_INVALID: Final = "invalid_request_error"
_PERMISSION: Final = "permission_error"
_RATE: Final = "rate_limit_error"
_SERVER: Final = "server_error"
_SOON_MS: Final = 1_000

HTTP: Final[Mapping[Reason, Http]] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: Http(400, _INVALID),
        Reason.CONTEXT_LENGTH_EXCEEDED: Http(400, _INVALID),
        Reason.UNSUPPORTED: Http(400, _INVALID),
        Reason.UNAUTHENTICATED: Http(401, "authentication_error"),
        Reason.PAYMENT_REQUIRED: Http(402, _PERMISSION),
        Reason.FORBIDDEN: Http(403, _PERMISSION),
        Reason.FORBIDDEN_TIER: Http(403, _PERMISSION),
        Reason.NOT_FOUND: Http(404, _INVALID),
        Reason.CONFLICT: Http(409, _INVALID),
        Reason.TOO_LARGE: Http(413, _INVALID),
        Reason.INVALID_INPUT: Http(422, _INVALID),
        Reason.QUEUE_FULL: Http(429, _RATE, _SOON_MS),
        Reason.ADMISSION_TIMEOUT: Http(429, _RATE, _SOON_MS),
        Reason.SATURATED: Http(429, _RATE, _SOON_MS),
        Reason.RATE_LIMITED: Http(429, _RATE, _SOON_MS),
        Reason.QUOTA_EXCEEDED: Http(429, _RATE, _SOON_MS),
        Reason.CANCELLED: Http(499, _INVALID),
        Reason.ENGINE_FAILED: Http(500, _SERVER),
        Reason.INTERNAL: Http(500, _SERVER),
        Reason.UPSTREAM_FAILED: Http(502, _SERVER),
        Reason.JOB_QUEUE_FULL: Http(503, _SERVER, _SOON_MS),
        Reason.DRAINING: Http(503, _SERVER, _SOON_MS),
        Reason.LOADING: Http(503, _SERVER, _SOON_MS),
        Reason.NO_CAPACITY: Http(503, _SERVER, _SOON_MS),
        Reason.ADMISSION_UNAVAILABLE: Http(503, _SERVER, _SOON_MS),
        Reason.UPSTREAM_TIMEOUT: Http(504, _SERVER),
    }
)


OVERFLOW_KEY: Final = "x-omniserve-overflow"
"""Tells the front door that somebody else may serve the request, and why; callers never see it."""
_ELSEWHERE: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        Reason.SATURATED: "saturated",
        Reason.QUEUE_FULL: "saturated",
        Reason.ENGINE_FAILED: "local_failed",
        Reason.UPSTREAM_FAILED: "local_failed",
        Reason.UPSTREAM_TIMEOUT: "local_failed",
        Reason.ADMISSION_UNAVAILABLE: "local_failed",
        Reason.DRAINING: "local_failed",
        Reason.LOADING: "local_failed",
        Reason.NO_CAPACITY: "local_failed",
    }
)
_MARKED: Final = 503


def note_if_caller_left(error: DomainError) -> None:
    """Log a request whose caller hung up; there is nobody left to whom its status could be told."""
    if error.reason is Reason.CANCELLED:
        _log.info("the caller left", status=HTTP[error.reason].status, why=error.message)


def retry_after_ms(error: DomainError) -> int | None:
    """Return when to come back, milliseconds; None when coming back does not help."""
    return error.retry_after_ms if error.retry_after_ms is not None else HTTP[error.reason].retry_after_ms


def error_object(error: DomainError, request_id: str) -> dict[str, Any]:
    """Return the error in OpenAI's shape, with reason and request id."""
    told: dict[str, Any] = {
        "message": error.message,
        "type": HTTP[error.reason].type,
        "param": error.field,
        "code": error.metadata.get("code", error.reason.value),
        "reason": error.reason.value,
        "request_id": request_id,
    }
    wait_ms = retry_after_ms(error)
    return {"error": told if wait_ms is None else told | {"retry_after_ms": wait_ms}}


def late_error_object(error: DomainError, request_id: str) -> dict[str, Any]:
    """Return the error for a stream whose headers are out; it carries the status they could not."""
    told = error_object(error, request_id)
    told["error"]["status"] = HTTP[error.reason].status
    return told


def error_response(
    error: DomainError,
    request_id: str,
    path: str,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
    may_leave: bool = False,
) -> Response:
    """Return the error as a whole response, in the shape that callers of the path know.

    `status` is for HTTP's own refusals that no reason stands for, such as 405. `may_leave`: somebody else serves what we cannot
    take; where the reason is such a one, the front door is told so.
    """
    told = error_object(error, request_id)
    sent = dict(headers or {})
    wait_ms = retry_after_ms(error)
    if wait_ms is not None:
        sent["retry-after"] = str(max(1, math.ceil(wait_ms / 1000)))
    if may_leave and error.reason in _ELSEWHERE:
        status, sent[OVERFLOW_KEY] = _MARKED, _ELSEWHERE[error.reason]
    return Response(
        orjson.dumps(anthropic_error(told) if path.startswith(_ANTHROPIC_PATHS) else told),
        status or HTTP[error.reason].status,
        headers=sent,
        media_type="application/json",
    )
