"""Errors with a constant reason: raised as DomainError, sent as gRPC status with ErrorInfo, read back by the caller.

A message carries the numbers, a reason never changes. Translation to gRPC happens in one guard, translation to HTTP
in the facade's one table.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType, TracebackType

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from services.kit import telemetry
from services.kit.context import current_request
from services.kit.handlers import Context, Handler, Wrapping

DOMAIN = "omniserve"
DETAILS_KEY = "grpc-status-details-bin"
# A negative value tells the caller's gRPC library that a retry of its own is pointless: we have decided, not failed.
_PUSHBACK = ("grpc-retry-pushback-ms", "-1")
# Status messages travel in a header of at most 8 KiB, percent-encoded, and twice (again inside the details).
_MAX_MESSAGE = 800

_log = telemetry.logger(__name__)


class Reason(StrEnum):
    """Why a call failed. The value is what callers see and may match on; it never changes."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED = "unsupported"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    FORBIDDEN_TIER = "forbidden_tier"
    PAYMENT_REQUIRED = "payment_required"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    TOO_LARGE = "too_large"
    INVALID_INPUT = "invalid_input"
    QUEUE_FULL = "queue_full"
    JOB_QUEUE_FULL = "job_queue_full"
    ADMISSION_TIMEOUT = "admission_timeout"
    SATURATED = "saturated"
    RATE_LIMITED = "rate_limited"
    QUOTA_EXCEEDED = "quota_exceeded"
    CANCELLED = "cancelled"
    ENGINE_FAILED = "engine_failed"
    INTERNAL = "internal"
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    DRAINING = "draining"
    LOADING = "loading"
    NO_CAPACITY = "no_capacity"
    ADMISSION_UNAVAILABLE = "admission_unavailable"


STATUS: Mapping[Reason, grpc.StatusCode] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.UNSUPPORTED: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
        Reason.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
        Reason.FORBIDDEN_TIER: grpc.StatusCode.PERMISSION_DENIED,
        Reason.PAYMENT_REQUIRED: grpc.StatusCode.PERMISSION_DENIED,
        Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
        Reason.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
        Reason.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_INPUT: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.JOB_QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.ADMISSION_TIMEOUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.SATURATED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.CANCELLED: grpc.StatusCode.CANCELLED,
        Reason.ENGINE_FAILED: grpc.StatusCode.INTERNAL,
        Reason.INTERNAL: grpc.StatusCode.INTERNAL,
        Reason.UPSTREAM_FAILED: grpc.StatusCode.UNAVAILABLE,
        Reason.UPSTREAM_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
        Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
        Reason.LOADING: grpc.StatusCode.UNAVAILABLE,
        Reason.NO_CAPACITY: grpc.StatusCode.UNAVAILABLE,
        Reason.ADMISSION_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    }
)

# What a status without our ErrorInfo means: it comes from gRPC itself or from a server that is not ours.
_REASON_OF_CODE: Mapping[grpc.StatusCode, Reason] = MappingProxyType(
    {
        grpc.StatusCode.CANCELLED: Reason.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_REQUEST,
        grpc.StatusCode.OUT_OF_RANGE: Reason.INVALID_REQUEST,
        grpc.StatusCode.DEADLINE_EXCEEDED: Reason.UPSTREAM_TIMEOUT,
        grpc.StatusCode.NOT_FOUND: Reason.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS: Reason.CONFLICT,
        grpc.StatusCode.FAILED_PRECONDITION: Reason.CONFLICT,
        grpc.StatusCode.ABORTED: Reason.CONFLICT,
        grpc.StatusCode.PERMISSION_DENIED: Reason.FORBIDDEN,
        grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.SATURATED,
        grpc.StatusCode.UNIMPLEMENTED: Reason.UNSUPPORTED,
    }
)


class DomainError(Exception):
    """A failure that the caller can understand.

    `reason`: constant. `message`: a sentence with the numbers in it. `field`: the request field at fault.
    `retry_after_ms`: when to come back, milliseconds. `metadata`: more facts, strings only.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata))

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code of its reason."""
        return STATUS[self.reason]

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def to_status(error: DomainError) -> status_pb2.Status:
    """Return the status with one ErrorInfo: reason, domain `omniserve`, metadata with `field` and `retry_after_ms`."""
    metadata = dict(error.metadata)
    if error.field is not None:
        metadata["field"] = error.field
    if error.retry_after_ms is not None:
        metadata["retry_after_ms"] = str(error.retry_after_ms)
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata))
    return status_pb2.Status(code=_number(error.code), message=_cut(error.message), details=[info])


def from_rpc_error(error: grpc.aio.AioRpcError, *, unavailable: Reason = Reason.UPSTREAM_FAILED) -> DomainError:
    """Return the DomainError that the peer raised.

    Without an ErrorInfo of ours the status code decides; a peer that cannot be reached becomes `unavailable`.
    """
    code, details = error.code(), error.details() or ""
    info = _error_info(error)
    if info is not None:
        metadata = dict(info.metadata)
        field, retry_after = metadata.pop("field", None), metadata.pop("retry_after_ms", None)
        return DomainError(
            Reason(info.reason),
            details,
            field=field,
            retry_after_ms=int(retry_after) if retry_after is not None and retry_after.isdecimal() else None,
            metadata=metadata,
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return DomainError(unavailable, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return DomainError(Reason.TOO_LARGE, details)
    return DomainError(_REASON_OF_CODE.get(code, Reason.INTERNAL), details)


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(value)
        except DecodeError:
            return None  # not our server's words: the status code has to do
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN and info.reason in set(Reason):
                return info
    return None


def find_domain_error(error: BaseException) -> DomainError | None:
    """Return the DomainError inside an exception: itself, or the first leaf of a group that holds nothing else."""
    if isinstance(error, DomainError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [find_domain_error(leaf) for leaf in error.exceptions]
        return found[0] if all(found) else None
    return None


async def abort(context: Context, error: DomainError) -> None:
    """End the RPC with the error's status. Always raises grpc.aio.AbortError."""
    request = current_request()
    if request is not None and "request_id" not in error.metadata:
        metadata = {**error.metadata, "request_id": request.request_id}
        error = DomainError(
            error.reason, error.message, field=error.field, retry_after_ms=error.retry_after_ms, metadata=metadata
        )
    trailing: Iterable[tuple[str, str | bytes]] = (
        *(context.trailing_metadata() or ()),
        (DETAILS_KEY, to_status(error).SerializeToString()),
        _PUSHBACK,
    )
    await context.abort(error.code, _cut(error.message), tuple(trailing))


class ErrorGuard:
    """Turns what a handler raises into a gRPC status.

    DomainError (also as the only content of an exception group) becomes its status with ErrorInfo. An AioRpcError that a
    handler let through is passed on with the peer's reason. Anything else is logged with its stack and becomes
    INTERNAL `internal` with the request id. The RPC's own cancellation and `context.abort` pass untouched.
    `draining` says whether the server is on its way out.
    """

    def __init__(self, *, draining: Callable[[], bool] = lambda: False) -> None:
        self._wrapping = Wrapping(lambda context, method: _Translated(context, method, draining))

    def guard(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Wrap the handler of any of the four RPC kinds."""
        return self._wrapping.of(handler, details.method)


class _Translated:
    """What one RPC runs inside. A class, since a generator costs each RPC more than many a handler does."""

    __slots__ = ("_context", "_draining", "_method")

    def __init__(self, context: Context, method: str, draining: Callable[[], bool]) -> None:
        self._context = context
        self._method = method
        self._draining = draining

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, grpc.aio.AbortError):
            return
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # Nobody cancelled this RPC: the handler waited for something that was cancelled. gRPC would take it for
                # the caller's doing and answer nothing, and the caller would wait for ever.
                await abort(self._context, self._interrupted(error))
        elif isinstance(error, Exception):  # the boundary: every failure becomes a status
            await abort(self._context, _known(error, self._method))

    def _interrupted(self, error: asyncio.CancelledError) -> DomainError:
        if self._draining():
            return DomainError(Reason.DRAINING, f"{self._method} was ended: the service is shutting down")
        return _unexpected(error, self._method)


def _known(error: Exception, method: str) -> DomainError:
    known = find_domain_error(error)
    if known is None and isinstance(error, grpc.aio.AioRpcError):
        known = from_rpc_error(error)
    if known is not None:
        _log.info("refused", method=method, reason=known.reason.value, message=known.message, field=known.field)
        return known
    return _unexpected(error, method)


def _unexpected(error: BaseException, method: str) -> DomainError:
    _log.error("unexpected error", method=method, exc_info=error)
    request = current_request()
    shown = f" (request {request.request_id})" if request is not None else ""
    return DomainError(Reason.INTERNAL, f"unexpected error in {method}{shown}; the log has the stack")


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def _number(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number
