"""The load client against a real socket."""

import asyncio
import json

from bench.llm.load import Burst, decode_result, run_burst

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "Once"}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
]


async def serve(handle):
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(
        next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")).split(b":")[1]
    )
    return json.loads(await reader.readexactly(length))


async def test_every_stream_of_a_burst_is_counted_and_timed_to_its_first_piece_of_text():
    asked = []
    together = asyncio.Barrier(3)

    async def handle(reader, writer):
        asked.append(await read_request(reader))
        await together.wait()  # no answer before all requests are here: they really are concurrent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for event in EVENTS:
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        writer.close()

    server, port = await serve(handle)
    async with server:
        bodies = tuple(json.dumps({"n": index}) for index in range(3))
        result = await asyncio.to_thread(run_burst, Burst(port, "/v1/chat/completions", bodies, limit_s=30))

    assert sorted(request["n"] for request in asked) == [0, 1, 2]
    assert result.complaint(1) is None
    assert result.tokens == 3
    assert [stream.answer.text for stream in result.streams] == ["Once"] * 3
    assert all(0 < stream.first_s <= stream.last_s for stream in result.streams)


async def test_a_stream_without_its_end_or_with_another_number_of_tokens_cannot_be_compared():
    async def handle(reader, writer):
        request = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for event in EVENTS:
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if request["ends"]:
            writer.write(b"data: [DONE]\n\n")
        writer.close()

    server, port = await serve(handle)
    async with server:
        cut, short = [
            await asyncio.to_thread(run_burst, Burst(port, "/", (json.dumps({"ends": ends}),), limit_s=30))
            for ends in (False, True)
        ]

    assert "cut short" in str(cut.complaint(1))
    assert short.complaint(2) == "1 tokens instead of 2, finish_reason length"


async def test_a_server_that_never_answers_ends_the_burst_at_its_limit():
    async def handle(reader, writer):
        await reader.read()
        writer.close()

    server, port = await serve(handle)
    async with server:
        result = await asyncio.to_thread(run_burst, Burst(port, "/", ("{}",), limit_s=0.05))

    assert result.streams[0].last_s is None
    assert "HTTP 0" in str(result.complaint(1))


def test_a_result_survives_its_way_between_the_processes():
    message = {
        "client_cpu_s": 0.5,
        "streams": [
            {
                "first_s": 0.1,
                "last_s": 0.2,
                "answer": {
                    "status": 200,
                    "events": 1,
                    "text": "a",
                    "finish_reason": "stop",
                    "prompt_tokens": 1,
                    "cached_tokens": None,
                    "completion_tokens": 1,
                    "done": True,
                    "error": None,
                },
            }
        ],
    }

    result = decode_result(json.loads(json.dumps(message)))

    assert result.seconds == 0.2
    assert result.streams[0].answer.finish_reason == "stop"
