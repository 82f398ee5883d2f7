"""Structured output and tools through the front door with the official OpenAI SDK: real Envoy, real model."""

import json
from typing import TYPE_CHECKING, Literal

import openai
import pytest
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells how warm it is in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = [{"role": "user", "content": "How warm is it in Paris?"}]


class Place(BaseModel):
    name: str = Field(max_length=16)
    kind: Literal["city", "country"]
    rivers: list[Literal["Seine", "Rhine"]] = Field(max_length=2)


@pytest.fixture
def client(mesh) -> "Iterator[openai.OpenAI]":
    with openai.OpenAI(base_url=f"{mesh.public_url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


@pytest.fixture
def model(client) -> str:
    return client.models.list().data[0].id


def test_an_answer_is_parsed_into_a_pydantic_model(client, model):
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Tell me about Paris."}],
        response_format=Place,
        temperature=0,
        max_tokens=120,
    )
    assert isinstance(answer.choices[0].message.parsed, Place)
    assert answer.choices[0].finish_reason == "stop"


def test_a_whole_round_with_a_tool(client, model):
    first = client.chat.completions.create(
        model=model, messages=QUESTION, tools=[TOOL], tool_choice=NAMED, temperature=0, max_tokens=80
    )
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    second = client.chat.completions.create(
        model=model,
        messages=[
            *QUESTION,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "It is 31 degrees."},
        ],
        tools=[TOOL],
        tool_choice="none",
        temperature=0,
        max_tokens=24,
    )
    assert second.choices[0].message.content
    assert second.choices[0].message.tool_calls is None


def test_streamed_calls_add_up_to_the_whole_one(client, model):
    asked = {
        "model": model,
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked, max_tokens=80)
    with client.chat.completions.stream(**asked, max_tokens=80) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].finish_reason == "tool_calls"
    streamed, plain = final.choices[0].message.tool_calls, whole.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in streamed] == [
        (call.function.name, call.function.arguments) for call in plain
    ]


def test_json_mode_and_a_grammar(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=8, temperature=0, extra_body={"grammar": 'root ::= "warm" | "cold"'}
    )
    assert answer.choices[0].message.content in {"warm", "cold"}
    cut = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, temperature=0, response_format={"type": "json_object"}
    )
    assert cut.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object", "properties": {"a": {"not": {}}}}}}},
            "response_format.json_schema.schema.properties.a.not",
        ),
        ({"grammar": "root ::= missing"}, "grammar"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"if": {}}}}}}]},
            "tools[0].function.parameters.properties.a.if",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_a_400_that_names_the_place(client, model, body, field):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=QUESTION, extra_body=body)
    assert caught.value.body["param"] == field
