"""What is known about the RPC being served: kept in a context variable, so that logs, errors and calls to peers find it."""

from contextvars import ContextVar
from typing import NamedTuple


class Request(NamedTuple):
    """The RPC that the current task serves. `traceparent` is the caller's W3C header, or None."""

    request_id: str
    traceparent: str | None = None


_current: ContextVar[Request | None] = ContextVar("omniserve_request", default=None)


def current_request() -> Request | None:
    """Return the RPC that the current task serves, or None outside one."""
    return _current.get()


def set_current_request(request: Request) -> None:
    """Remember the RPC for the rest of the current task and the tasks it starts."""
    _current.set(request)
