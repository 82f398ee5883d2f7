"""One call that is served: what comes in, the task of its handler, and the context that the handler is given."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, Self, cast

import grpc
import grpc.aio
from typing_extensions import override

from services.kit import telemetry
from services.kit.handlers import Context, Handler
from services.kit.wire.line import Line
from services.kit.wire.messages import Assembler, MessageError
from services.kit.wire.metadata import Pairs
from services.kit.wire.outlet import Metadata, Outlet

_log = telemetry.logger(__name__)

_HESITATION_S: Final = 0.5
"""How long a refusal waits for the first word of a caller who sends a stream.

gRPC's asyncio client takes a first write that fails, because the call has ended meanwhile, for the call's status.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """What the headers of a call say; handlers are looked up with it, so it has the names of grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Pairs
    timeout_s: float | None
    is_streaming: bool
    """Whether the caller sends any number of messages instead of one."""


class Home(Protocol):
    """The server of calls."""

    most_bytes: int
    """The longest message, and the most that may wait for a handler that does not read."""

    def handler(self, head: Head) -> Handler:
        """Return what answers a call; asked in the call's own task."""
        ...

    def left(self, call: "ServedCall") -> None:
        """Note that a call has ended and its handler with it."""
        ...


class ServedCall(Context):
    """A call, from its headers to its status. For its line it is a stream, for its handler the context."""

    def __init__(self, home: Home, line: Line, number: bytes, head: Head) -> None:
        self._home = home
        self._line = line
        self._head = head
        self._loop = asyncio.get_running_loop()
        self._assembler = Assembler(home.most_bytes)
        self._inbox: deque[bytes] = deque()
        self._unread_bytes = 0
        self._has_heard_all = False
        self._has_heard = False
        self._hesitation: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._handler: Handler | None = None
        self._is_finished = False
        self._out = Outlet(line, number, self._leave)
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Pairs = ()
        self._callbacks: list[Callable[[Any], None]] = []
        self._ends_at = None if head.timeout_s is None else self._loop.time() + head.timeout_s
        self._timer = None if self._ends_at is None else self._loop.call_at(self._ends_at, self._run_late)
        if head.is_streaming:
            self._stir()

    # ---- for the line ---------------------------------------------------------------------------------------------

    def take(self, payload: bytes) -> None:
        """Take a piece of the body."""
        try:
            messages = self._assembler.feed(payload)
        except MessageError as error:
            self.give_up(error.code, str(error))
            return
        if not messages:
            return
        self._note_speech()
        self._inbox.extend(messages)
        self._unread_bytes += sum(map(len, messages))
        if len(self._inbox) > 1 and self._unread_bytes > self._home.most_bytes:
            text = f"the handler is {self._unread_bytes} bytes behind; {self._home.most_bytes} is the most"
            self.give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        else:
            self._stir()

    def hang_up(self) -> None:
        """Note that the caller has said its last."""
        self._has_heard_all = True
        self._note_speech()
        if not self._assembler.is_between:
            self.give_up(grpc.StatusCode.INTERNAL, "the caller ended within a message")
        elif self._head.is_streaming:
            self._stir()
        elif self._task is None:
            self.give_up(grpc.StatusCode.INTERNAL, "the caller ended without a message")

    def over(self) -> None:
        """Note that the caller has given up: the handler is cancelled, and nobody hears what it says."""
        if self._out.is_open:
            self._out.close()
            self._code = grpc.StatusCode.CANCELLED
            self._leave()

    def lost(self) -> None:
        """Note that the connection is gone, which is the same to the handler."""
        self.over()

    def room(self, more: int) -> None:
        """Note that the caller takes so many bytes more (or, below zero, fewer)."""
        self._out.room(more)

    def go_on(self) -> bool:
        """Say a turn's worth of what waits for the line, and return whether there is more to say at once."""
        return self._out.go_on()

    # ---- its end --------------------------------------------------------------------------------------------------

    def give_up(self, code: grpc.StatusCode, text: str) -> None:
        """End the call from here with a status, cancelling its handler; no effect on one that has ended."""
        if self._out.is_open:
            self._code, self._details = code, text
            self._out.cut(code, text)

    def _run_late(self) -> None:
        self.give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _leave(self) -> None:
        """Go, as soon as the handler has cleaned up."""
        for timer in (self._timer, self._hesitation):
            if timer is not None:
                timer.cancel()
        if self._task is None or self._is_finished:
            self._gone()
        else:
            self._task.add_done_callback(lambda _ended: self._gone())
            self._task.cancel()

    def _gone(self) -> None:
        for callback in self._callbacks:
            callback(self)
        self._home.left(self)

    # ---- its handler ----------------------------------------------------------------------------------------------

    def _stir(self) -> None:
        if self._task is None:
            self._task = self._loop.create_task(self._serve())
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _serve(self) -> None:
        try:
            self._handler = self._home.handler(self._head)
            await self._behave(cast("Any", self._handler))
        except grpc.aio.AbortError:
            pass  # its status stands already
        except asyncio.CancelledError:
            if not self._out.is_open:
                raise
            self._code = grpc.StatusCode.CANCELLED  # nobody cancelled the call: what its handler waited for was
        except Exception as error:  # noqa: BLE001 - whatever it is, it is one call that fails
            _log.exception("a handler failed", method=self._head.method)
            self._code, self._details = grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}"
        self._is_finished = True
        if self._head.is_streaming and not self._has_heard and self._code is not grpc.StatusCode.OK:
            self._hesitation = self._loop.call_later(_HESITATION_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._out.end(self._code, self._details, self._trailing)

    def _note_speech(self) -> None:
        """Note that the caller's first word has come; an end that waits for it waits no longer."""
        self._has_heard = True
        if self._hesitation is not None:
            self._hesitation.cancel()
            self._hesitation = None
            self._end()

    async def _behave(self, handler: Any) -> None:  # noqa: ANN401 - the stubs know no behaviours
        """Run a guarded handler (kit.handlers): a coroutine that returns the answer, or writes each to the context."""
        request = _Requests(self) if handler.request_streaming else self._request()
        if handler.response_streaming:
            await (handler.stream_stream if handler.request_streaming else handler.unary_stream)(request, self)
            return
        response = await (handler.stream_unary if handler.request_streaming else handler.unary_unary)(request, self)
        if self._code is grpc.StatusCode.OK and self._out.is_open:
            self._out.send(self._serialised(response))

    def _request(self) -> Any:  # noqa: ANN401 - any message
        data = self._inbox.popleft()
        self._unread_bytes -= len(data)
        parse = cast("Handler", self._handler).request_deserializer
        try:
            return data if parse is None else parse(data)
        except Exception as error:
            self._code, self._details = grpc.StatusCode.INTERNAL, "Exception deserializing request!"
            raise grpc.aio.AbortError(self._details) from error

    def _serialised(self, message: Any) -> bytes:  # noqa: ANN401 - any message
        serialise = cast("Handler", self._handler).response_serializer
        data = cast("bytes", message if serialise is None else serialise(message))
        if len(data) > self._home.most_bytes:
            self._code = grpc.StatusCode.RESOURCE_EXHAUSTED
            self._details = f"Sent message larger than max ({len(data)} vs. {self._home.most_bytes})"
            raise grpc.aio.AbortError(self._details)
        return data

    # ---- for its handler ------------------------------------------------------------------------------------------

    @override
    async def read(self) -> Any:
        """Return the next message of the caller, or grpc.aio.EOF."""
        while not self._inbox:
            if self._has_heard_all:
                return grpc.aio.EOF
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._request()

    @override
    async def write(self, message: Any) -> None:
        """Send a message; waits while the caller does not read. Raises CancelledError when nobody is there to hear it."""
        if not self._out.is_open:
            raise asyncio.CancelledError
        self._out.send(self._serialised(message))
        await self._out.drained()

    @override
    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        self._out.begin(initial_metadata)

    @override
    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status. Always raises grpc.aio.AbortError."""
        if self._out.is_open:
            self._code, self._details = code, details
            self._trailing = tuple(trailing_metadata) or self._trailing
        raise grpc.aio.AbortError(details)

    @override
    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    @override
    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        self._trailing = tuple(trailing_metadata)

    @override
    def trailing_metadata(self) -> Pairs:  # type: ignore[override] # pairs, as gRPC itself gives them
        return self._trailing

    @override
    def invocation_metadata(self) -> Pairs:  # type: ignore[override] # as above
        return self._head.invocation_metadata

    @override
    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    @override
    def code(self) -> grpc.StatusCode:
        return self._code

    @override
    def set_details(self, details: str) -> None:
        self._details = details

    @override
    def details(self) -> str:
        return self._details

    @override
    def time_remaining(self) -> float | None:  # type: ignore[override] # the stubs know no call without a deadline
        """Return the seconds until the caller's deadline, or None when it has none."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._loop.time())

    @override
    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    @override
    def cancelled(self) -> bool:
        return self._code is grpc.StatusCode.CANCELLED and not self._out.is_open

    @override
    def done(self) -> bool:
        return not self._out.is_open

    @override
    def peer(self) -> str:
        return self._line.peer

    @override
    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    @override
    def peer_identity_key(self) -> str | None:
        return None

    @override
    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    @override
    def set_compression(self, compression: grpc.Compression) -> None:
        """Leave answers as they are, which every caller understands."""

    @override
    def disable_next_message_compression(self) -> None:
        """Leave answers as they are."""


class _Requests:
    """What the caller says, message by message. No generator: those are closed late, when they are left early."""

    def __init__(self, call: ServedCall) -> None:
        self._call = call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401 - any message
        message = await self._call.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message
