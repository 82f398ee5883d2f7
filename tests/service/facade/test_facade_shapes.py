"""The shapes of answers, by a schema of our own: runs also where OpenAI's description is not at hand."""

import asyncio

import jsonschema
import pytest

from omniserve.llm.v1 import llm_pb2

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
FINISH = {"enum": ["stop", "length", "tool_calls"]}


def exactly(required: dict, optional: dict | None = None) -> dict:
    """An object with these members and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": required | (optional or {}),
        "additionalProperties": False,
    }


def choices(required: dict) -> dict:
    return {"type": "array", "minItems": 1, "items": exactly({"index": COUNT, **required})}


LOGPROB = {"token": TEXT, "logprob": {"type": "number"}, "bytes": {"type": "array", "items": {"type": "integer"}}}
CONTENT = {
    "type": "array",
    "items": exactly(LOGPROB | {"top_logprobs": {"type": "array", "items": exactly(LOGPROB)}}),
}
LOGPROBS = {"anyOf": [{"type": "null"}, exactly({"content": CONTENT, "refusal": {"type": "null"}})]}
COMPLETION_LOGPROBS = {
    "anyOf": [
        {"type": "null"},
        exactly({name: {"type": "array"} for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}),
    ]
}
USAGE = exactly(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": exactly({"cached_tokens": COUNT}),
        "completion_tokens_details": exactly(
            dict.fromkeys(("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"), COUNT)
        ),
        "cached_prompt_tokens": COUNT,
    }
)
TIMINGS = exactly({"queue_ms": COUNT, "prefill_ms": COUNT, "decode_ms": COUNT})
DELTA = exactly({}, {"role": {"const": "assistant"}, "content": TEXT, "refusal": {"type": "null"}})
MESSAGE = exactly({"role": {"const": "assistant"}, "content": TEXT, "refusal": {"type": "null"}})
NOT_YET = {"anyOf": [{"type": "null"}, FINISH]}


def head(kind: str, prefix: str) -> dict:
    return {
        "id": {"type": "string", "pattern": f"^{prefix}"},
        "object": {"const": kind},
        "created": COUNT,
        "model": TEXT,
    }


CHAT = exactly(
    head("chat.completion", "chatcmpl-")
    | {
        "choices": choices({"message": MESSAGE, "logprobs": LOGPROBS, "finish_reason": FINISH}),
        "usage": USAGE,
        "omniserve": TIMINGS,
    }
)
CHAT_CHUNK = exactly(
    head("chat.completion.chunk", "chatcmpl-")
    | {"choices": choices({"delta": DELTA, "logprobs": LOGPROBS, "finish_reason": NOT_YET}), "usage": {"type": "null"}}
)
USAGE_CHUNK = exactly(
    head("chat.completion.chunk", "chatcmpl-") | {"choices": {"const": []}, "usage": USAGE, "omniserve": TIMINGS}
)
COMPLETION = exactly(
    head("text_completion", "cmpl-")
    | {
        "choices": choices({"text": TEXT, "logprobs": COMPLETION_LOGPROBS, "finish_reason": FINISH}),
        "usage": USAGE,
        "omniserve": TIMINGS,
    }
)
COMPLETION_CHUNK = exactly(
    head("text_completion", "cmpl-")
    | {"choices": choices({"text": TEXT, "logprobs": COMPLETION_LOGPROBS, "finish_reason": NOT_YET})}
)
ERROR = exactly(
    {
        "error": exactly(
            {
                "message": {"type": "string", "minLength": 1},
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": TEXT,
                "reason": TEXT,
                "request_id": {"type": "string", "minLength": 1},
            },
            {"retry_after_ms": COUNT},
        )
    }
)
HI = llm_pb2.TokenLogprob(token="hi", raw=b"hi", logprob=-0.5)
LIKELY = [llm_pb2.TokenLogprob(token="hi", raw=b"hi", logprob=-0.5, top=[HI])]


def check(schema: dict, value: object) -> None:
    jsonschema.Draft202012Validator(schema).validate(value)


async def say_hi(mesh, logprobs) -> None:
    started = await mesh.llm.started()
    started.text("hi", logprobs=logprobs)
    started.finish()


@pytest.mark.parametrize("logprobs", [[], LIKELY], ids=["plain", "with log-probabilities"])
async def test_a_chat_has_our_shape_whole_and_in_chunks(mesh, chat, read_stream, logprobs):
    asking = chat()
    await say_hi(mesh, logprobs)
    check(CHAT, (await asking).json())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(say_hi(mesh, logprobs))
        async with read_stream(mesh, stream_options={"include_usage": True}) as reading:
            *chunks, counts, done = await reading.rest()
    assert done == "[DONE]"
    for chunk in chunks:
        check(CHAT_CHUNK, chunk)
    check(USAGE_CHUNK, counts)


@pytest.mark.parametrize("logprobs", [[], LIKELY], ids=["plain", "with log-probabilities"])
async def test_a_completion_has_our_shape_whole_and_in_chunks(mesh, read_stream, logprobs):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(say_hi(mesh, logprobs))
        check(COMPLETION, (await mesh.http.post("/v1/completions", json={"prompt": "x"})).json())
        tasks.create_task(say_hi(mesh, logprobs))
        async with read_stream(mesh, "/v1/completions", prompt="x") as reading:
            *chunks, done = await reading.rest()
    assert done == "[DONE]"
    for chunk in chunks:
        check(COMPLETION_CHUNK, chunk)


async def test_every_refusal_has_our_shape(mesh):
    answers = [
        await mesh.http.post("/v1/chat/completions", content=b"{"),
        await mesh.http.post("/v1/chat/completions", json={"messages": []}),
        await mesh.http.get("/v1/chat/completions"),
        await mesh.http.get("/v1/models/other"),
        await mesh.http.get("/nothing"),
        await mesh.http.post("/v1/audio/speech", json={}),
    ]
    for answer in answers:
        check(ERROR, answer.json())
    assert [answer.status_code for answer in answers] == [400, 400, 405, 404, 404, 404]
