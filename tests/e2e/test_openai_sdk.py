"""The official OpenAI SDK against the front door: real Envoy, real model."""

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(mesh) -> "Iterator[openai.OpenAI]":
    with openai.OpenAI(base_url=f"{mesh.public_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client) -> str:
    return client.models.list().data[0].id


def test_a_chat_answers_paris(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same_as_a_whole_one(client, model):
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    with client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks if chunk.usage][-1].completion_tokens == whole.usage.completion_tokens
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_usage_chunk_comes_only_when_asked_for(client, model):
    with client.chat.completions.create(model=model, messages=QUESTION, max_tokens=4, stream=True) as stream:
        assert all(chunk.usage is None for chunk in stream)


def test_a_completion_continues_a_text(client, model):
    answer = client.completions.create(model=model, prompt="One, two, three,", temperature=0, max_tokens=8)
    assert "four" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client, model):
    answer = client.completions.create(
        model=model, prompt="One, two, three,", temperature=0, max_tokens=32, stop=["six"]
    )
    assert "five" in answer.choices[0].text
    assert "six" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_an_echoed_prompt_comes_with_its_log_probabilities(client, model):
    answer = client.completions.create(
        model=model, prompt="One, two, three,", temperature=0, max_tokens=0, echo=True, logprobs=1
    )
    told = answer.choices[0].logprobs
    assert answer.choices[0].text == "".join(told.tokens) == "One, two, three,"
    assert told.token_logprobs[0] is None
    assert all(each < 0 for each in told.token_logprobs[1:])


async def test_sixteen_streams_at_once_all_end_with_a_finish_reason(mesh, model):
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.public_url}/v1", api_key="none", max_retries=0, timeout=90
    ) as client:

        async def one(number: int) -> tuple[str, str | None]:
            text, reason = "", None
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Say the number {number} and tell a short story about it."}],
                temperature=0,
                max_tokens=24,
                stream=True,
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            return text, reason

        answers = await asyncio.gather(*(one(number) for number in range(16)))
    assert all(text for text, _ in answers)
    assert {reason for _, reason in answers} <= {"stop", "length"}


def test_an_unknown_model_is_a_404_that_names_it(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert refused.value.code == "model_not_found"
    assert "no-such-model" in refused.value.message


def test_the_model_list_names_what_can_be_asked(client):
    models = client.models.list().data
    assert models
    assert client.models.retrieve(models[0].id).id == models[0].id
