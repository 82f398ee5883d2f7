"""The server end that services answer by, spoken with by gRPC's own client and by callers who do what no client does."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from hpack import Decoder

from services.kit.handlers import GuardedHandlers
from services.kit.wire.server import WireServer

ECHO = "/test.v1.Echo/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST = 3_000_000


class Echo:
    """What is served; `ended` notes handlers that were cancelled, `written` counts what `Pour` could say."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.written = 0
        self.go = asyncio.Event()

    async def unary(self, request: bytes, context) -> bytes:
        if request == b"fail":
            raise ValueError("asked to")
        if request == b"abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "100 % ünmöglich", (("x-why-bin", b"\0\xff"),))
        if request == b"metadata":
            await context.send_initial_metadata((("x-first", "one"),))
            context.set_trailing_metadata((("x-last-bin", b"\0\xfe"),))
            return repr(sorted(item for item in context.invocation_metadata() if item[0] != "user-agent")).encode()
        if request == b"wait":
            await self.waiting("unary")
        if request == b"time":
            return str(context.time_remaining()).encode()
        return request * 2 if request.startswith(b"double") else request[::-1]

    async def pour(self, request: bytes, context) -> None:
        """Write a piece of 100,000 bytes as often as asked."""
        for _ in range(int(request)):
            await context.write(b"p" * 100_000)
            self.written += 1

    async def gather(self, requests, _context) -> bytes:
        return b"".join([request async for request in requests])

    async def both(self, requests, context) -> None:
        async for request in requests:
            if request == b"wait":
                await self.waiting("both")
            await context.write(request[::-1])

    async def deaf(self, _requests, _context) -> bytes:
        await self.waiting("deaf")
        return b""

    async def refusing(self, _requests, context) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    async def waiting(self, what: str) -> None:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended.append(what)
            raise


def picky(data: bytes) -> bytes:
    if data == b"garbage":
        raise ValueError("no message")
    return data


def handlers(echo: Echo) -> GuardedHandlers:
    found = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo.unary, picky),
        "Pour": grpc.unary_stream_rpc_method_handler(echo.pour),
        "Gather": grpc.stream_unary_rpc_method_handler(echo.gather),
        "Both": grpc.stream_stream_rpc_method_handler(echo.both),
        "Deaf": grpc.stream_unary_rpc_method_handler(echo.deaf),
        "Refusing": grpc.stream_stream_rpc_method_handler(echo.refusing),
    }
    return GuardedHandlers((grpc.method_handlers_generic_handler("test.v1.Echo", found),), ())


@pytest.fixture
async def served() -> AsyncIterator[SimpleNamespace]:
    echo, server = Echo(), WireServer(most_bytes=MOST)
    server.add(handlers(echo))
    port = server.bind("127.0.0.1:0")
    await server.start()
    options = (("grpc.max_receive_message_length", 8_000_000), ("grpc.max_send_message_length", 8_000_000))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield SimpleNamespace(echo=echo, server=server, port=port, channel=channel)
    await server.stop(None)


async def eventually(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# ---- gRPC's own client ----------------------------------------------------------------------------------------------


async def test_all_four_kinds_of_call_are_answered(served):
    channel = served.channel
    assert await channel.unary_unary(ECHO + "Unary")(b"abc") == b"cba"
    assert await channel.unary_unary(ECHO + "Unary")(b"") == b""
    assert [len(each) async for each in channel.unary_stream(ECHO + "Pour")(b"3")] == [100_000] * 3
    assert await channel.stream_unary(ECHO + "Gather")(iter([b"a", b"", b"b"])) == b"ab"
    assert [each async for each in channel.stream_stream(ECHO + "Both")(iter([b"ab", b"cd"]))] == [b"ba", b"dc"]


async def test_messages_larger_than_every_window_arrive_whole_side_by_side(served):
    method = served.channel.unary_unary(ECHO + "Unary")
    asked = [bytes([number, 1]) * 1_200_000 for number in range(8)]
    assert await asyncio.gather(*map(method, asked)) == [each[::-1] for each in asked]


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_callers_may_compress(served, compression):
    method = served.channel.unary_unary(ECHO + "Unary")
    assert await method(b"ab" * 10_000, compression=compression) == b"ba" * 10_000


async def test_messages_that_are_too_long_are_refused_in_both_directions(served):
    error = await refused(served.channel.unary_unary(ECHO + "Unary")(b"a" * (MOST + 1)))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"Received message larger than max ({MOST + 1} vs. {MOST})",
    )
    error = await refused(served.channel.unary_unary(ECHO + "Unary")(b"double" + b"a" * 1_500_000))
    assert error.details() == f"Sent message larger than max (3000012 vs. {MOST})"


async def test_metadata_goes_both_ways(served):
    call = served.channel.unary_unary(ECHO + "Unary")(b"metadata", metadata=(("x-a", "b"), ("x-raw-bin", b"\0\x01")))
    assert await call == repr([("x-a", "b"), ("x-raw-bin", b"\0\x01")]).encode()
    assert dict(await call.initial_metadata())["x-first"] == "one"
    assert dict(await call.trailing_metadata())["x-last-bin"] == b"\0\xfe"


async def test_a_status_reaches_the_caller_with_its_words_and_metadata(served):
    error = await refused(served.channel.unary_unary(ECHO + "Unary")(b"abort"))
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "100 % ünmöglich")
    assert dict(error.trailing_metadata())["x-why-bin"] == b"\0\xff"


async def test_what_nobody_serves_is_unimplemented(served):
    assert (await refused(served.channel.unary_unary(ECHO + "Other")(b""))).code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await refused(served.channel.unary_unary("/who/Knows")(b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_that_is_none_and_a_handler_that_fails_take_no_other_call_with_them(served):
    method = served.channel.unary_unary(ECHO + "Unary")
    other = method(b"wait")
    assert (await refused(method(b"garbage"))).code() is grpc.StatusCode.INTERNAL
    assert (await refused(method(b"fail"))).code() is grpc.StatusCode.UNKNOWN
    served.echo.go.set()
    assert await other == b"tiaw"


async def test_a_deadline_is_known_to_the_handler_and_ends_it(served):
    method = served.channel.unary_unary(ECHO + "Unary")
    assert await method(b"time") == b"None"
    assert 0 < float(await method(b"time", timeout=60)) <= 61  # gRPC's client rounds up
    assert (await refused(method(b"wait", timeout=0.2))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: served.echo.ended == ["unary"])


async def test_a_caller_that_leaves_ends_its_handler(served):
    call = served.channel.stream_stream(ECHO + "Both")()
    await call.write(b"ab")
    assert await call.read() == b"ba"
    await call.write(b"wait")
    await asyncio.sleep(0.05)
    call.cancel()
    await eventually(lambda: served.echo.ended == ["both"])


async def test_a_refusal_of_a_stream_is_what_its_caller_hears_whenever_it_speaks(served):
    """gRPC's client takes a first write that fails for the call's status, and so a quick refusal would be lost."""
    for _ in range(100):
        call = served.channel.stream_stream(ECHO + "Refusing")(iter([b"a" * 1_000]))
        assert (await refused(call.read())).code() is grpc.StatusCode.PERMISSION_DENIED
    silent = served.channel.stream_stream(ECHO + "Refusing")()
    assert await silent.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_more_than_may_wait_for_a_handler_that_does_not_read_ends_the_call(served):
    call = served.channel.stream_unary(ECHO + "Deaf")(iter([b"a" * 1_000_000] * 5))
    assert (await refused(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await eventually(lambda: served.echo.ended == ["deaf"])


async def test_a_stop_lets_calls_end_and_takes_no_new_ones(served):
    method = served.channel.unary_unary(ECHO + "Unary")
    running = method(b"wait")
    answer = asyncio.ensure_future(running)
    await eventually(lambda: served.server._calls)
    await asyncio.sleep(0.1)
    stopping = asyncio.ensure_future(served.server.stop(20))
    await asyncio.sleep(0.1)
    assert (await refused(method(b"late"))).code() is grpc.StatusCode.UNAVAILABLE
    served.echo.go.set()
    assert await answer == b"tiaw"
    await stopping
    assert not served.echo.ended


# ---- what no gRPC client does ---------------------------------------------------------------------------------------


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


def head(method: str, *more: tuple[bytes, bytes]) -> bytes:
    pairs = ((b":method", b"POST"), (b":path", (ECHO + method).encode()), (b"content-type", b"application/grpc"), *more)
    return b"".join(literal(*pair) for pair in pairs)


def message(data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


SETTINGS = frame(4, 0, 0) + frame(4, 1, 0)
FIRST = b"\x20"  # after the settings that forbid a table, the first head has to give it up


@asynccontextmanager
async def caller(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def hear(reader: asyncio.StreamReader, wait_for: bytes) -> bytes:
    heard = b""
    while wait_for not in heard:
        data = await reader.read(65_536)
        if not data:
            break
        heard += data
    return heard


async def talk(port: int, said: bytes, wait_for: bytes) -> bytes:
    async with caller(port) as (reader, writer):
        writer.write(PREFACE + said)
        return await hear(reader, wait_for)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (frame(1, 0x5, 1, FIRST + head("Unary")), b"13"),
        (frame(1, 0x4, 1, FIRST + head("Unary")) + frame(0, 1, 1, message(b"abc")[:6]), b"13"),
        (frame(1, 0x4, 1, FIRST + head("Unary")) + frame(0, 0, 1, b"\x09" + message(b"abc")[1:]), b"13"),
        (frame(1, 0x4, 1, FIRST + head("Unary", (b"grpc-timeout", b"soon"))), b"13"),
        (frame(1, 0x4, 1, FIRST + head("Unary", (b"x-bin", b"%%%"))), b"13"),
        (frame(1, 0x4, 1, FIRST + head("Unary", (b"grpc-timeout", b"20m"))), b"4"),
    ],
    ids=["no message", "half a message", "unknown flag", "no timeout", "no base64", "nothing until the deadline"],
)
async def test_a_call_that_says_nothing_sensible_is_told_so_and_leaves_nothing_behind(served, said, status):
    heard = await talk(served.port, SETTINGS + said, b"grpc-status")
    assert b"grpc-status" + bytes((len(status),)) + status in heard
    await eventually(lambda: not served.server._calls)


async def test_what_is_not_grpc_is_an_unsupported_medium(served):
    said = frame(1, 0x5, 1, FIRST + literal(b":method", b"GET") + literal(b":path", b"/"))
    assert b"415" in await talk(served.port, SETTINGS + said, b"415")


async def test_a_window_as_narrow_as_the_caller_likes_is_kept(served):
    narrow = frame(4, 0, 0, b"\0\x04\0\0\0\x0a") + frame(4, 1, 0)
    async with caller(served.port) as (reader, writer):
        writer.write(
            PREFACE + narrow + frame(1, 0x4, 1, FIRST + head("Unary")) + frame(0, 1, 1, message(b"0123456789"))
        )
        assert frame(0, 0, 1, message(b"9876543210")[:10]) in await hear(reader, b"98765")
        writer.write(frame(8, 0, 1, struct.pack(">I", 2)))
        assert await hear(reader, b"43") == frame(0, 0, 1, b"43")
        writer.write(frame(4, 0, 0, b"\0\x04\0\0\0\x0d"))  # three more on every stream that is open
        assert frame(0, 0, 1, b"210") in await hear(reader, b"grpc-status")


async def test_a_handler_waits_for_a_caller_that_does_not_read(served):
    wide = frame(4, 0, 0, b"\0\x04\x7f\xff\xff\xff") + frame(4, 1, 0)
    async with caller(served.port) as (reader, writer):
        writer.write(PREFACE + wide + frame(1, 0x4, 1, FIRST + head("Pour")) + frame(0, 1, 1, message(b"50")))
        written = -1
        while written != served.echo.written or not written:
            written = served.echo.written
            await asyncio.sleep(0.3)
        assert written < 10  # the connection's window has 65,535 bytes; some more may wait
        writer.write(frame(8, 0, 0, struct.pack(">I", 10_000_000)))
        await hear(reader, b"grpc-status")
    assert served.echo.written == 50


async def test_a_long_answer_that_waits_for_the_connection_holds_up_no_short_one(served):
    wide = frame(4, 0, 0, b"\0\x04\x7f\xff\xff\xff") + frame(4, 1, 0)
    async with caller(served.port) as (reader, writer):
        writer.write(PREFACE + wide + frame(1, 0x4, 1, FIRST + head("Pour")) + frame(0, 1, 1, message(b"20")))
        await eventually(lambda: served.echo.written > 2)
        writer.write(frame(1, 0x4, 3, head("Unary")) + frame(0, 1, 3, message(b"short")))
        await asyncio.sleep(0.1)
        writer.write(frame(8, 0, 0, struct.pack(">I", 200_000)))
        assert b"trohs" in await hear(reader, b"trohs")
        writer.write(frame(8, 0, 0, struct.pack(">I", 2_000_000)))
        assert b"grpc-status" in await hear(reader, b"grpc-status")
        assert served.echo.written == 20


async def test_a_caller_that_forbids_a_table_of_headers_is_heeded_in_every_head(served):
    none = frame(4, 0, 0, b"\0\x01\0\0\0\0") + frame(4, 1, 0)
    said = none + frame(1, 0x4, 1, FIRST + head("Unary")) + frame(0, 1, 1, message(b"metadata"))
    heard = await talk(served.port, said, b"grpc-status")
    decoder, heads = Decoder(), []
    decoder.max_allowed_table_size = 0
    while heard:
        stop = 9 + int.from_bytes(heard[:3], "big")
        if heard[3] == 1:
            heads.append(dict(decoder.decode(heard[9:stop])))
        heard = heard[stop:]
    assert (heads[0][":status"], heads[0]["x-first"], heads[-1]["grpc-status"]) == ("200", "one", "0")


async def test_calls_with_traces_of_their_own_are_told_apart_although_their_heads_are_remembered(served):
    heads = [head("Unary", (b"traceparent", b"trace-%d" % number)) for number in range(3)]
    asked = b"".join(
        frame(1, 0x4, 2 * number + 1, (b"" if number else FIRST) + each)
        + frame(0, 1, 2 * number + 1, message(b"metadata"))
        for number, each in enumerate(heads)
    )
    async with caller(served.port) as (reader, writer):
        writer.write(PREFACE + SETTINGS + asked)
        heard = b""
        while heard.count(b"grpc-status") < 3:
            heard += await reader.read(65_536)
    assert all(b"trace-%d" % number in heard for number in range(3))
    assert len(served.server.known) == 1


async def test_a_connection_that_breaks_ends_its_calls(served):
    async with caller(served.port) as (_, writer):
        writer.write(PREFACE + SETTINGS + frame(1, 0x4, 1, FIRST + head("Both")) + frame(0, 0, 1, message(b"wait")))
        await eventually(lambda: served.server._calls)
        await asyncio.sleep(0.1)
    await eventually(lambda: served.echo.ended == ["both"] and not served.server.lines)


async def test_a_stream_that_comes_after_the_goodbye_is_given_back_unheard(served):
    async with caller(served.port) as (reader, writer):
        writer.write(PREFACE + SETTINGS + frame(1, 0x4, 1, FIRST + head("Unary")) + frame(0, 1, 1, message(b"wait")))
        await eventually(lambda: served.server._calls)
        stopping = asyncio.ensure_future(served.server.stop(20))
        await hear(reader, frame(7, 0, 0, struct.pack(">II", 1, 0)))
        writer.write(frame(1, 0x5, 3, head("Unary")))
        refusal = frame(3, 0, 3, struct.pack(">I", 7))
        assert refusal in await hear(reader, refusal)
        served.echo.go.set()
        assert b"tiaw" in await hear(reader, b"grpc-status")
        await stopping


async def test_a_quiet_peer_is_pinged_and_a_silent_one_given_up(served, monkeypatch):
    monkeypatch.setattr("services.kit.wire.server._LOOKED_EVERY_S", 0.05)
    monkeypatch.setattr("services.kit.wire.server._SILENT_S", 0.3)
    server = WireServer(most_bytes=MOST)
    server.add(handlers(served.echo))
    port = server.bind("127.0.0.1:0")
    await server.start()
    said = SETTINGS + frame(1, 0x4, 1, FIRST + head("Both")) + frame(0, 0, 1, message(b"wait"))
    assert b"omniserv" in await talk(port, said, b"never")
    await eventually(lambda: served.echo.ended == ["both"])
    await server.stop(None)
