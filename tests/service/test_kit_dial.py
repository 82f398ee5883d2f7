"""A long call to a peer: answered by our own server end, by gRPC's, and by peers that behave as neither does."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import grpc
import grpc.aio
import pytest

from services.kit.handlers import GuardedHandlers
from services.kit.wire.dial import LongCall, dialled
from services.kit.wire.server import WireServer

PATH = "/test.v1.Echo/Both"
MOST = 3_000_000
SETTINGS = struct.pack(">I", 0)[1:] + b"\x04\0" + bytes(4)


class Peer:
    """Says everything back, twice; `bye` ends the call well, `refuse` does not, `wait` does nothing until it is cancelled."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.metadata: dict[str, str | bytes] = {}

    async def both(self, requests, context) -> None:
        self.metadata = dict(context.invocation_metadata())
        async for request in requests:
            if request == b"bye":
                return
            if request == b"refuse":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "100 % völl", (("x-why-bin", b"\0\xff"),))
            if request == b"wait":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.ended.set()
                    raise
            await context.write(request)
            await context.write(request[::-1])

    def handlers(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(self.both)
        return grpc.method_handlers_generic_handler("test.v1.Echo", {"Both": method})


@asynccontextmanager
async def ours(peer: Peer) -> AsyncIterator[int]:
    server = WireServer(most_bytes=MOST)
    server.add(GuardedHandlers((peer.handlers(),), ()))
    port = server.bind("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


@asynccontextmanager
async def grpcs(peer: Peer) -> AsyncIterator[int]:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", MOST),))
    server.add_generic_rpc_handlers((peer.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


@pytest.fixture(params=[ours, grpcs])
async def served(request) -> AsyncIterator[tuple[Peer, int]]:
    peer = Peer()
    async with request.param(peer) as port:
        yield peer, port


class Ear:
    """What is heard."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._more = asyncio.Event()

    def __call__(self, message: bytes) -> None:
        if message == b"deaf":
            raise ValueError("not this")
        self.heard.append(message)
        self._more.set()

    async def until(self, count: int) -> list[bytes]:
        async with asyncio.timeout(20):
            while len(self.heard) < count:
                self._more.clear()
                await self._more.wait()
        return self.heard


def call(port: int, heard: Callable[[bytes], None], metadata=()):
    return dialled(f"127.0.0.1:{port}", PATH, metadata=metadata, heard=heard, most_bytes=MOST)


async def status(long: LongCall) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(20):
        error = await long.end()
    assert error is not None
    return error.code(), error.details()


async def test_messages_go_both_ways_in_order_until_the_peer_ends_the_call(served):
    peer, port = served
    ear = Ear()
    async with call(port, ear, (("x-a", "b"), ("x-raw-bin", b"\0\x01"))) as long:
        for word in (b"ab", b"", b"cde"):
            await long.say(word)
        assert await ear.until(6) == [b"ab", b"ba", b"", b"", b"cde", b"edc"]
        await long.say(b"bye")
        async with asyncio.timeout(20):
            assert await long.end() is None
        await long.say(b"after the end")
    assert (peer.metadata["x-a"], peer.metadata["x-raw-bin"]) == ("b", b"\0\x01")


async def test_messages_larger_than_every_window_arrive_whole(served):
    ear, large = Ear(), bytes(range(250)) * 10_000
    async with call(served[1], ear) as long:
        await long.say(large)
        await long.say(large)
        assert await ear.until(4) == [large, large[::-1]] * 2


async def test_a_refusal_comes_with_its_words_and_metadata(served):
    async with call(served[1], Ear()) as long:
        await long.say(b"refuse")
        error = await long.end()
    assert error is not None
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "100 % völl")
    assert dict(error.trailing_metadata())["x-why-bin"] == b"\0\xff"


async def test_leaving_the_block_gives_the_call_up(served):
    peer, port = served
    ear = Ear()
    async with call(port, ear) as long:
        await long.say(b"a")
        await ear.until(2)
        await long.say(b"wait")
        await asyncio.sleep(0.1)
    assert (await status(long))[0] is grpc.StatusCode.CANCELLED
    async with asyncio.timeout(20):
        await peer.ended.wait()


async def test_a_method_that_nobody_serves_is_unimplemented(served):
    async with dialled(
        f"127.0.0.1:{served[1]}", "/test.v1.Echo/Other", metadata=(), heard=Ear(), most_bytes=MOST
    ) as long:
        assert (await status(long))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_what_cannot_be_taken_ends_the_call_and_not_the_process(served):
    async with call(served[1], Ear()) as long:
        await long.say(b"deaf")
        assert (await status(long))[0] is grpc.StatusCode.INTERNAL


async def test_nobody_there_is_an_error_at_once():
    with pytest.raises(OSError, match=r"(?i)connect"):
        async with call(1, Ear()):
            pass


# ---- peers that no gRPC server is -----------------------------------------------------------------------------------


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


OPENED = frame(1, 0x4, 1, b"\x88" + literal(b"content-type", b"application/grpc"))


async def say_and_read(said: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(said)
    while await reader.read(65_536):
        pass
    writer.close()


@asynccontextmanager
async def saying(*said: bytes) -> AsyncIterator[int]:
    server = await asyncio.start_server(partial(say_and_read, b"".join(said)), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ((frame(7, 0, 0, struct.pack(">II", 0, 0)),), grpc.StatusCode.UNAVAILABLE),
        ((OPENED, frame(3, 0, 1, struct.pack(">I", 2))), grpc.StatusCode.UNAVAILABLE),
        ((OPENED, frame(0, 1, 1)), grpc.StatusCode.INTERNAL),
        ((OPENED, frame(0, 0, 1, b"\0" + struct.pack(">I", MOST + 1))), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ((OPENED, frame(1, 5, 1, literal(b"grpc-status", b"77"))), grpc.StatusCode.UNKNOWN),
        ((OPENED, frame(1, 5, 1, literal(b"grpc-status", b"0") + literal(b"a-bin", b"%"))), grpc.StatusCode.INTERNAL),
        ((frame(1, 4, 1, literal(b":status", b"502")),), grpc.StatusCode.UNAVAILABLE),
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n",), grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["gone", "reset", "no status", "too long", "odd status", "odd metadata", "a proxy's answer", "HTTP/1"],
)
async def test_an_end_of_any_kind_is_told_by_a_code(said, code):
    async with saying(SETTINGS, *said) as port, call(port, Ear()) as long:
        assert (await status(long))[0] is code


async def test_a_peer_that_falls_silent_is_given_up(monkeypatch):
    monkeypatch.setattr("services.kit.wire.dial.LOOKED_EVERY_S", 0.05)
    monkeypatch.setattr("services.kit.wire.dial.SILENT_S", 0.3)
    async with saying(SETTINGS, OPENED) as port, call(port, Ear()) as long:
        assert await status(long) == (grpc.StatusCode.UNAVAILABLE, "the connection is lost")


async def test_whoever_says_more_than_the_peer_takes_waits(served):
    async with saying(SETTINGS, OPENED) as port, call(port, Ear()) as long:
        async with asyncio.timeout(20):
            await long.say(b"a" * 100_000)  # more than the first window, less than may wait
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await long.say(b"a" * 1_000_000)
