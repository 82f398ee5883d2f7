"""What stands before and around the handlers of a server: guards, and the wrapping of the four RPC kinds.

Guards instead of grpc.aio's interceptors, which are coroutines chained anew for every RPC and cost more than many a
handler does: a guard is a function that is called as the handler is looked up, in the RPC's own task.

The wrapper is always a coroutine that writes to the context, never an async generator: when a caller leaves while a
message is being written, the cancellation is raised inside the wrapper, which then closes the service's generator at
once and in the same task. A generator around a generator would be closed by the garbage collector, later and in
another task, and with it everything the service does in its `finally`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc
import grpc.aio
from typing_extensions import override

if TYPE_CHECKING:  # generic in the stubs only
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
else:
    Handler = grpc.RpcMethodHandler
    Context = grpc.aio.ServicerContext

Around = Callable[[Context, str], AbstractAsyncContextManager[None]]

Behaviour = Callable[[Any, Context], Any]


class Guard(Protocol):
    """Stands before the handlers of a server."""

    def guard(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Return what answers the RPC: the handler, or one in its place."""
        ...


class GuardedHandlers(grpc.GenericRpcHandler):
    """Handlers of a server behind guards, the outermost guard first."""

    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler], guards: Sequence[Guard]) -> None:
        self._handlers = tuple(handlers)
        self._inside_out = tuple(reversed(guards))

    def find(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of an RPC as it is, unguarded; None when there is none."""
        for handlers in self._handlers:
            handler = handlers.service(handler_call_details)
            if handler is not None:
                return handler
        return None

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the guarded handler of an RPC; None when there is none."""
        handler = self.find(handler_call_details)
        if handler is not None:
            for each in self._inside_out:
                handler = each.guard(handler, handler_call_details)
        return handler


class Wrapping:
    """Wraps handlers in one context manager, as `wrap_handler` does, and keeps what it made of each method's handler."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._made: dict[str, tuple[Handler, Handler]] = {}

    def of(self, handler: Handler, method: str) -> Handler:
        """Return the handler wrapped."""
        made = self._made.get(method)
        if made is None or made[0] is not handler:
            made = self._made[method] = handler, wrap_handler(handler, self._around, method)
        return made[1]


def wrap_handler(handler: Handler, around: Around, method: str) -> Handler:
    """Return a handler of the same kind whose behaviour runs inside `around(context, method)`."""
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        outer = _streaming(cast("Behaviour", inner), around, method)
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        outer = _single(cast("Behaviour", inner), around, method)
    wrapped: Handler = cast("Any", make)(outer, handler.request_deserializer, handler.response_serializer)
    return wrapped


def _single(behaviour: Behaviour, around: Around, method: str) -> Behaviour:
    async def respond(request: Any, context: Context) -> Any:  # noqa: ANN401 - any message
        async with around(context, method):
            return await behaviour(request, context)

    return respond


def _streaming(behaviour: Behaviour, around: Around, method: str) -> Behaviour:
    async def respond(request: Any, context: Context) -> None:  # noqa: ANN401 - any message
        async with around(context, method):
            result = behaviour(request, context)
            if not hasattr(result, "__aiter__"):
                await result  # the other style: a coroutine that writes to the context itself
                return
            async with aclosing(cast("AsyncGenerator[Any, None]", result)) as messages:
                async for message in messages:
                    await context.write(message)

    return respond


def refusing_handler(handler: Handler, error: Exception) -> Handler:
    """Return a handler of the same kind that raises `error` instead of reading the request."""

    @asynccontextmanager
    async def refuse(_context: Context, _method: str) -> AsyncIterator[None]:
        raise error
        yield

    return wrap_handler(handler, refuse, "")
