"""Responses validate against OpenAI's published description of its API."""

import asyncio
import base64

import numpy as np
import pytest

from omniserve.llm.v1 import llm_pb2

LOGPROBS = [
    llm_pb2.TokenLogprob(
        token="hi", raw=b"hi", logprob=-0.5, id=3, top=[llm_pb2.TokenLogprob(token="hi", raw=b"hi", logprob=-0.5)]
    )
]
CALL = llm_pb2.ToolCallDelta(id="call_1", name="weather", arguments_json='{"city":')


async def talk(mesh, *, deltas: list[dict]) -> None:
    started = await mesh.llm.started()
    for delta in deltas:
        started.say(output=llm_pb2.Output(choices=[llm_pb2.ChoiceDelta(**delta)]))
    started.finish(choices=1)


DELTAS = {
    "text": [{"text": "hi"}],
    "nothing": [{}],
    "logprobs": [{"text": "hi", "logprobs": LOGPROBS}],
    "a tool call": [
        {"tool_calls": [CALL]},
        {"tool_calls": [llm_pb2.ToolCallDelta(arguments_json='"Paris"}')]},
    ],
    "reasoning": [{"reasoning": "hm"}, {"text": "hi"}],
}


@pytest.mark.parametrize("kind", DELTAS)
async def test_a_chats_answer_conforms(mesh, chat, check_openai, kind):
    asking = chat()
    await talk(mesh, deltas=DELTAS[kind])
    check_openai("CreateChatCompletionResponse", (await asking).json())


@pytest.mark.parametrize("kind", DELTAS)
async def test_the_chunks_of_a_chat_conform(mesh, read_stream, check_openai, kind):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(talk(mesh, deltas=DELTAS[kind]))
        async with read_stream(mesh, stream_options={"include_usage": True}) as reading:
            *chunks, done = await reading.rest()
    assert done == "[DONE]"
    for chunk in chunks:
        check_openai("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("kind", ["text", "nothing", "logprobs"])
async def test_a_completions_answer_and_chunks_conform(mesh, read_stream, check_openai, kind):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(talk(mesh, deltas=DELTAS[kind]))
        answer = await mesh.http.post("/v1/completions", json={"prompt": "x", "model": "tiny"})
        check_openai("CreateCompletionResponse", answer.json())
        tasks.create_task(talk(mesh, deltas=DELTAS[kind]))
        async with read_stream(mesh, "/v1/completions", prompt="x") as reading:
            *chunks, _ = await reading.rest()
    check_openai("CreateCompletionResponse", chunks[-1])
    for chunk in chunks[:-1]:
        # Until a choice ends its reason is null: so says OpenAI's own stream, though the description has no word for it.
        (choice,) = chunk["choices"]
        assert choice["finish_reason"] is None
        check_openai("CreateCompletionResponse", {**chunk, "choices": [{**choice, "finish_reason": "stop"}]})


async def test_models_and_errors_conform(mesh, check_openai):
    check_openai("ListModelsResponse", (await mesh.http.get("/v1/models")).json())
    check_openai("Model", (await mesh.http.get("/v1/models/tiny")).json())
    check_openai("ErrorResponse", (await mesh.http.get("/v1/models/other")).json())
    check_openai("ErrorResponse", (await mesh.http.post("/v1/chat/completions", content=b"{")).json())


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_conform(mesh, check_openai, encoding):
    body = {"input": ["a", "bb"], "model": "tiny", "encoding_format": encoding}
    answer = (await mesh.http.post("/v1/embeddings", json=body)).json()
    if encoding == "base64":  # the description knows numbers only; the SDK asks for base64 and decodes it
        for each in answer["data"]:
            each["embedding"] = np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist()
    assert [each["embedding"] for each in answer["data"]] == [[1.0, 0.5], [2.0, 0.5]]
    check_openai("CreateEmbeddingResponse", answer)
