"""Responses validate against OpenAI's published description of its API."""

import asyncio
import base64
import os
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml

from omniserve.llm.v1 import llm_pb2

SPEC = Path(
    os.environ.get("OMNISERVE_CONFORMANCE_SPEC")
    or Path(__file__).resolve().parents[4] / "shared" / "conformance" / "openai-openapi.yaml"
)
pytestmark = pytest.mark.skipif(
    not SPEC.exists(), reason=f"{SPEC} is not there; OMNISERVE_CONFORMANCE_SPEC names OpenAI's API description"
)
LOGPROBS = [
    llm_pb2.TokenLogprob(
        token="hi", raw=b"hi", logprob=-0.5, id=3, top=[llm_pb2.TokenLogprob(token="hi", raw=b"hi", logprob=-0.5)]
    )
]
CALL = llm_pb2.ToolCallDelta(id="call_1", name="weather", arguments_json='{"city":')


def nullable(schema):
    """Return the schema with OpenAPI 3.0's `nullable`, which the file still uses here and there, as a type."""
    if isinstance(schema, list):
        return [nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: nullable(each) for name, each in schema.items()}
    if changed.pop("nullable", False) is True:
        return {"anyOf": [changed, {"type": "null"}]}
    return changed


@pytest.fixture(scope="module")
def components():
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return nullable(yaml.load(SPEC.read_text(), Loader=loader)["components"])  # noqa: S506 - a safe loader


@pytest.fixture(scope="module")
def check(components):
    """Return `check(name, value)`."""

    def validate(name: str, value: object) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        jsonschema.Draft202012Validator(schema).validate(value)

    return validate


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
async def test_a_chats_answer_conforms(mesh, chat, check, kind):
    asking = chat()
    await talk(mesh, deltas=DELTAS[kind])
    check("CreateChatCompletionResponse", (await asking).json())


@pytest.mark.parametrize("kind", DELTAS)
async def test_the_chunks_of_a_chat_conform(mesh, read_stream, check, kind):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(talk(mesh, deltas=DELTAS[kind]))
        async with read_stream(mesh, stream_options={"include_usage": True}) as reading:
            *chunks, done = await reading.rest()
    assert done == "[DONE]"
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("kind", ["text", "nothing", "logprobs"])
async def test_a_completions_answer_and_chunks_conform(mesh, read_stream, check, kind):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(talk(mesh, deltas=DELTAS[kind]))
        answer = await mesh.http.post("/v1/completions", json={"prompt": "x", "model": "tiny"})
        check("CreateCompletionResponse", answer.json())
        tasks.create_task(talk(mesh, deltas=DELTAS[kind]))
        async with read_stream(mesh, "/v1/completions", prompt="x") as reading:
            *chunks, _ = await reading.rest()
    check("CreateCompletionResponse", chunks[-1])
    for chunk in chunks[:-1]:
        # Until a choice ends its reason is null: so says OpenAI's own stream, though the description has no word for it.
        (choice,) = chunk["choices"]
        assert choice["finish_reason"] is None
        check("CreateCompletionResponse", {**chunk, "choices": [{**choice, "finish_reason": "stop"}]})


async def test_models_and_errors_conform(mesh, check):
    check("ListModelsResponse", (await mesh.http.get("/v1/models")).json())
    check("Model", (await mesh.http.get("/v1/models/tiny")).json())
    check("ErrorResponse", (await mesh.http.get("/v1/models/other")).json())
    check("ErrorResponse", (await mesh.http.post("/v1/chat/completions", content=b"{")).json())


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_conform(mesh, check, encoding):
    body = {"input": ["a", "bb"], "model": "tiny", "encoding_format": encoding}
    answer = (await mesh.http.post("/v1/embeddings", json=body)).json()
    if encoding == "base64":  # the description knows numbers only; the SDK asks for base64 and decodes it
        for each in answer["data"]:
            each["embedding"] = np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist()
    assert [each["embedding"] for each in answer["data"]] == [[1.0, 0.5], [2.0, 0.5]]
    check("CreateEmbeddingResponse", answer)
