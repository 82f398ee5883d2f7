"""Envoy's short way in, spoken with by gRPC's own client and by callers who break the protocol."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import ClassVar

import grpc
import grpc.aio
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from services.kit.wire.callouts import LONGEST_MESSAGE, Call, Callouts, beside, envelope, open_callouts, unary
from services.kit.wire.line import Line

STREAM, UNARY = "/test.v1.Echo/Stream", "/test.v1.Echo/Unary"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TOKEN = (("x-omniserve-service-token", "right"),)
WHOLE = b"\0\0\0\0"


class Echo(Call):
    """Says everything back; `stop` ends the call from here, `fail` breaks it."""

    running: ClassVar["set[Echo]"] = set()

    def __init__(self, line: Line, number: bytes) -> None:
        super().__init__(line, number)
        self.running.add(self)

    def message(self, data: bytes) -> None:
        if data == b"fail":
            raise ValueError("asked to")
        if data == b"stop":
            self.running.discard(self)
            self.end()
        else:
            self.send(envelope(data))

    def over(self) -> None:
        self.running.discard(self)


def check(path: str, token: str | None) -> str | None:
    return None if token == "right" or path.startswith("/test.v1.Open/") else f"{path} wants a token"


@pytest.fixture
async def callouts() -> AsyncIterator[tuple[Callouts, int]]:
    Echo.running.clear()
    served = Callouts({STREAM: Echo, UNARY: unary(lambda data: data[::-1])}, check)
    async with open_callouts("127.0.0.1:0", served) as port:
        yield served, port


@asynccontextmanager
async def grpc_channel(port: int) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


async def eventually(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_grpcs_own_client_has_a_question_answered(callouts):
    async with grpc_channel(callouts[1]) as channel:
        call = channel.unary_unary(UNARY)
        assert await call(b"abc", metadata=TOKEN) == b"cba"
        assert await call(b"", metadata=TOKEN) == b""


async def test_grpcs_own_client_holds_many_streams_open_at_once(callouts):
    async with grpc_channel(callouts[1]) as channel:
        method = channel.stream_stream(STREAM)
        calls = [method(metadata=TOKEN) for _ in range(3_000)]
        for number, call in enumerate(calls):
            await call.write(str(number).encode())
        assert [await call.read() for call in calls] == [str(number).encode() for number in range(3_000)]
        assert len(Echo.running) == 3_000
        for call in calls[::2]:
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        for call in calls[1::2]:
            call.cancel()
        await eventually(lambda: not Echo.running)


async def test_questions_larger_than_a_frame_arrive_whole(callouts):
    async with grpc_channel(callouts[1]) as channel:
        method = channel.unary_unary("/test.v1.Echo/Unary")
        question = bytes(range(256)) * 60
        assert await method(question, metadata=TOKEN) == question[::-1]


async def test_a_stream_can_be_ended_from_the_servers_side(callouts):
    async with grpc_channel(callouts[1]) as channel:
        call = channel.stream_stream(STREAM)(metadata=TOKEN)
        await call.write(b"one")
        assert await call.read() == b"one"
        await call.write(b"stop")
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert not Echo.running


async def test_nobody_without_the_token_is_heard(callouts):
    async with grpc_channel(callouts[1]) as channel:
        for metadata in ((), (("x-omniserve-service-token", "wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(UNARY)(b"abc", metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_that_is_right_once_is_not_remembered_for_wrong_ones(callouts):
    async with grpc_channel(callouts[1]) as channel:
        method = channel.unary_unary(UNARY)
        for _ in range(3):
            assert await method(b"abc", metadata=TOKEN) == b"cba"
            with pytest.raises(grpc.aio.AioRpcError):
                await method(b"abc", metadata=(("x-omniserve-service-token", "right?"),))


async def test_a_call_that_nobody_serves_is_unimplemented(callouts):
    async with grpc_channel(callouts[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/test.v1.Open/Door")(b"abc")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_call_that_fails_takes_no_other_with_it(callouts):
    async with grpc_channel(callouts[1]) as channel:
        good, bad = (channel.stream_stream(STREAM)(metadata=TOKEN) for _ in range(2))
        await good.write(b"one")
        assert await good.read() == b"one"
        await bad.write(b"fail")
        assert await bad.code() is grpc.StatusCode.INTERNAL
        await good.write(b"two")
        assert await good.read() == b"two"
        assert len(Echo.running) == 1


async def test_more_than_the_callers_window_waits_for_room_and_none_is_lost(callouts):
    async with grpc_channel(callouts[1]) as channel:
        method = channel.unary_unary(UNARY)
        questions = [bytes((number % 256, number // 256)) * 5_000 for number in range(400)]
        answers = await asyncio.gather(*(method(each, metadata=TOKEN) for each in questions))
        assert answers == [each[::-1] for each in questions]


async def test_a_question_without_end_is_refused(callouts):
    async with grpc_channel(callouts[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(UNARY)(bytes(1 << 19), metadata=TOKEN)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_caller_that_vanishes_takes_its_calls_with_it(callouts):
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{callouts[1]}")
    call = channel.stream_stream(STREAM)(metadata=TOKEN)
    await call.write(b"one")
    await call.read()
    await channel.close()
    await eventually(lambda: not Echo.running)


def test_an_answer_that_does_not_fit_is_refused_where_it_is_made():
    assert len(envelope(b"a" * LONGEST_MESSAGE)) == LONGEST_MESSAGE + 5
    with pytest.raises(ValueError, match="the most"):
        envelope(b"a" * (LONGEST_MESSAGE + 1))


def test_callouts_are_beside_the_service():
    assert beside("127.0.0.1:9101") == "127.0.0.1:9112"
    assert beside("[::1]:0") == "[::1]:0"


# ---- what no gRPC client does ---------------------------------------------------------------------------------------


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


LATER_HEAD = literal(b":path", STREAM.encode()) + literal(b"x-omniserve-service-token", b"right")
HEAD = b"\x20" + LATER_HEAD  # after the settings that forbid a table, the first head has to give it up
SETTINGS = frame(4, 0, 0) + frame(4, 1, 0)
QUESTION = b"\0\0\0\0\x03abc"


async def talk(port: int, *said: bytes, wait_for: bytes = b"abc") -> bytes:
    """Say something, read until the peer has said `wait_for` or closed, and return what was heard."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    try:
        async with asyncio.timeout(20):
            for each in said:
                writer.write(each)
                await writer.drain()
                await asyncio.sleep(0)
            while wait_for not in heard:
                data = await reader.read(65_536)
                if not data:
                    break
                heard += data
    except ConnectionError:
        pass
    finally:
        writer.close()
    return heard


@pytest.mark.parametrize(
    "frames",
    [
        frame(1, 0x4, 1, HEAD) + frame(0, 0, 1, QUESTION),
        frame(1, 0x4 | 0x20, 1, b"\0\0\0\0\x10" + HEAD) + frame(0, 0, 1, QUESTION),
        frame(1, 0x4 | 0x8, 1, b"\x03" + HEAD + b"\0\0\0") + frame(0, 0x8, 1, b"\x02" + QUESTION + b"\0\0"),
        frame(1, 0, 1, HEAD[:20])
        + frame(9, 0, 1, HEAD[20:30])
        + frame(9, 0x4, 1, HEAD[30:])
        + frame(0, 0, 1, QUESTION),
        frame(1, 0x4, 1, HEAD)
        + frame(0, 0, 1, QUESTION[:3])
        + frame(2, 0, 1, b"\0" * 5)
        + frame(0, 0, 1, QUESTION[3:]),
        frame(77, 0, 0, b"who knows") + frame(1, 0x4, 1, HEAD) + frame(0, 0, 1, QUESTION),
        frame(1, 0x4, 1, HEAD) + frame(1, 0x4, 3, LATER_HEAD) + frame(0, 0, 3, QUESTION),
    ],
    ids=["plain", "priority", "padded", "continued", "in pieces", "unknown kind", "known head"],
)
async def test_every_way_to_ask_that_the_protocol_has_is_understood(callouts, frames: bytes):
    assert b"abc" in await talk(callouts[1], PREFACE + SETTINGS + frames)


async def test_calls_with_traces_of_their_own_have_one_head_and_whoever_has_no_token_none(callouts):
    served, port = callouts
    traced = [LATER_HEAD + literal(b"traceparent", b"trace-%d" % number) for number in range(5)]
    asked = b"".join(frame(1, 0x4, 2 * number + 3, head) for number, head in enumerate(traced))
    assert b"abc" in await talk(port, PREFACE + SETTINGS + frame(1, 0x4, 1, HEAD) + asked + frame(0, 0, 11, QUESTION))
    assert len(served.known) == 1

    stranger = traced[0].replace(b"right", b"wrong")
    heard = await talk(
        port, PREFACE + SETTINGS + frame(1, 0x4, 1, HEAD) + frame(1, 0x4, 3, stranger), wait_for=b"wants"
    )
    assert b"wants a token" in heard
    assert len(served.known) == 1


async def test_what_only_looks_like_a_trace_is_not_taken_out_of_a_head(callouts):
    served, port = callouts
    heads = [LATER_HEAD + literal(b"x", b"\x0btraceparent\x05" + tail) for tail in (b"first", b"other")]
    asked = b"".join(frame(1, 0x4, 2 * number + 3, head) for number, head in enumerate(heads))
    assert b"abc" in await talk(port, PREFACE + SETTINGS + frame(1, 0x4, 1, HEAD) + asked + frame(0, 0, 5, QUESTION))
    assert not served.known


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(cuts=st.lists(st.integers(1, 200), max_size=12))
async def test_it_does_not_matter_how_the_bytes_are_cut(callouts, cuts: list[int]):
    said = PREFACE + SETTINGS + frame(1, 0x4, 1, HEAD) + frame(0, 0x1, 1, QUESTION)
    places = [0, *sorted(min(cut, len(said)) for cut in cuts), len(said)]
    pieces = [said[start:stop] for start, stop in pairwise(places)]
    assert b"abc" in await talk(callouts[1], *pieces, wait_for=b"grpc-status")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        PREFACE + frame(1, 0x4, 1, b"\xff\xff\xff\xff\xff\xff"),
        PREFACE + frame(9, 0x4, 1, HEAD),
        PREFACE + frame(1, 0, 1, HEAD) + frame(6, 0, 0, b"12345678"),
        PREFACE + frame(1, 0x4 | 0x8, 1, b"\xff" + HEAD),
        PREFACE + b"\x7f\xff\xff" + bytes(6),
        PREFACE + 5 * frame(8, 0, 0, b"\x7f\xff\xff\xff"),
        PREFACE + frame(1, 0, 1, HEAD) + 5 * frame(9, 0, 1, bytes(16_000)),
    ],
    ids=[
        "HTTP/1",
        "headers that are none",
        "continuation of nothing",
        "headers interrupted",
        "padding without end",
        "frame too long",
        "window without end",
        "headers without end",
    ],
)
async def test_whoever_breaks_the_protocol_loses_the_connection(callouts, said: bytes):
    heard = await talk(callouts[1], said, wait_for=b"never")
    assert struct.pack(">I", 0x7FFFFFFF) in heard
    assert not callouts[0].lines


async def test_a_compressed_question_is_refused(callouts):
    heard = await talk(
        callouts[1],
        PREFACE + SETTINGS + frame(1, 0x4, 1, HEAD) + frame(0, 0, 1, b"\x01" + QUESTION[1:]),
        wait_for=b"grpc-message",
    )
    assert b"grpc-status\x018" in heard
    assert not Echo.running


async def test_a_ping_is_answered_so_that_a_hung_process_is_noticed(callouts):
    pong = frame(6, 1, 0, b"12345678")
    assert pong in await talk(callouts[1], PREFACE + frame(6, 0, 0, b"12345678"), wait_for=pong)


async def test_a_peer_that_answers_no_ping_is_given_up(callouts, monkeypatch):
    monkeypatch.setattr("services.kit.wire.callouts.SILENT_S", 0.2)
    monkeypatch.setattr("services.kit.wire.callouts.LOOKED_EVERY_S", 0.1)
    watch = asyncio.ensure_future(callouts[0].run())
    heard = await talk(
        callouts[1], PREFACE + SETTINGS + frame(1, 0x4, 1, HEAD) + frame(0, 0, 1, QUESTION), wait_for=b"never"
    )
    assert b"omniserv" in heard
    await eventually(lambda: not Echo.running and not callouts[0].lines)
    watch.cancel()
