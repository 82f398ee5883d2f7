"""What the official OpenAI SDK makes of failures: a broken answer must never look like a whole one."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

HELLO = [{"role": "user", "content": "Hello"}]
FULL = DomainError(Reason.QUEUE_FULL, "10000 wait already", retry_after_ms=1500)


@pytest.fixture
async def client(mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    headers = mesh.token("envoy-public")
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=30, default_headers=headers
    ) as client:
        yield client


async def test_a_refused_stream_is_an_error_with_its_own_status(mesh, client):
    asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    (await mesh.llm.started()).refuse(FULL)
    with pytest.raises(openai.RateLimitError) as refused:
        await asking
    assert refused.value.code == "queue_full"
    assert refused.value.body["reason"] == "queue_full"
    assert refused.value.response.headers["retry-after"] == "2"


async def test_a_stream_that_breaks_raises_after_its_text(mesh, client):
    asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    started = await mesh.llm.started()
    started.text("half an answer")
    pieces = []

    async def read() -> None:
        async for chunk in await asking:
            pieces.append(chunk.choices[0].delta.content or "")
            if pieces[-1]:
                started.break_stream()

    with pytest.raises(openai.APIError) as broken:
        await read()
    assert "".join(pieces) == "half an answer"
    assert broken.value.code == "upstream_failed"
    assert broken.value.body["status"] == 502


async def test_the_retries_of_the_sdk_get_past_a_short_refusal(mesh, client):
    patient = client.with_options(max_retries=2)
    asking = asyncio.ensure_future(patient.chat.completions.create(model="tiny", messages=HELLO))
    (await mesh.llm.started()).refuse(DomainError(Reason.LOADING, "the model loads", retry_after_ms=10))
    again = await mesh.llm.started()
    again.text("Paris")
    again.finish()
    assert (await asking).choices[0].message.content == "Paris"


async def test_our_own_fields_go_through_the_sdks_extra_body(mesh, client):
    asking = asyncio.ensure_future(
        client.chat.completions.create(
            model="tiny", messages=HELLO, extra_body={"top_k": 7, "chat_template_kwargs": {"enable_thinking": False}}
        )
    )
    started = await mesh.llm.started()
    started.finish()
    await asking
    assert started.start.chat.options.sampling.top_k == 7
    assert started.start.chat.enable_thinking is False
    assert started.start.chat.HasField("enable_thinking")


async def test_a_tool_call_is_read_whole(mesh, client):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO, tools=tools))
    started = await mesh.llm.started()
    call = llm_pb2.ToolCallDelta(id="call_1", name="weather", arguments_json='{"city": "Paris"}')
    started.say(output=llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(tool_calls=[call])]))
    started.finish(llm_pb2.FINISH_REASON_TOOL_CALLS)
    (choice,) = (await asking).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert started.start.chat.tools[0].name == "weather"
