"""LangChain's OpenAI classes against a running mesh: `BASE_URL=http://.../v1 pytest langchain_chat.py`, in an environment that has them."""

import asyncio
import json
import os

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

BASE_URL = os.environ["BASE_URL"]
QUESTION = "What is the capital of France?"
MODELS = [each.id for each in openai.OpenAI(base_url=BASE_URL, api_key="none").models.list()]


@tool
def get_weather(city: str) -> str:
    """Tell how warm it is in a city."""
    return f"21 C in {city}"


class Place(BaseModel):
    """A place on a map."""

    name: str = Field(max_length=12)
    kind: str = Field(pattern="^(city|country)$")


def chat(**options: object) -> ChatOpenAI:
    options = {"model": MODELS[0], "temperature": 0, "max_tokens": 60, "max_retries": 0, "timeout": 240, **options}
    return ChatOpenAI(base_url=BASE_URL, api_key="none", **options)


def test_a_chat_answers_and_counts_its_tokens():
    answer = chat().invoke([SystemMessage("Answer questions correctly."), HumanMessage(QUESTION)])
    assert "Paris" in answer.content
    assert (
        answer.usage_metadata["total_tokens"]
        == answer.usage_metadata["input_tokens"] + answer.usage_metadata["output_tokens"]
    )
    assert answer.response_metadata["finish_reason"] == "stop"


def test_a_stream_adds_up_to_the_whole_answer():
    whole = chat().invoke(QUESTION)
    added = None
    for chunk in chat(stream_usage=True).stream(QUESTION):
        added = chunk if added is None else added + chunk
    assert added.content == whole.content
    assert added.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


async def answers_at_once(questions):
    return await chat(max_tokens=8).abatch(questions)


def test_a_batch_is_answered_in_order():
    answers = asyncio.run(answers_at_once([QUESTION, "Say hello.", "Count to three."]))
    assert len(answers) == 3
    assert all(answer.content for answer in answers)


def test_a_bound_tool_is_called_whole_and_streamed_and_its_result_fed_back():
    bound = chat().bind_tools([get_weather], tool_choice="get_weather")
    question = HumanMessage("How warm is it in Paris?")
    called = bound.invoke([question])
    assert called.tool_calls[0]["name"] == "get_weather"
    assert isinstance(called.tool_calls[0]["args"]["city"], str)
    added = None
    for chunk in bound.stream([question]):
        added = chunk if added is None else added + chunk
    assert added.tool_calls[0]["args"] == called.tool_calls[0]["args"]
    result = get_weather.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage)
    answer = chat().bind_tools([get_weather], tool_choice="none").invoke([question, called, result])
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert not answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_read_into_a_model(method):
    place = chat().with_structured_output(Place, method=method).invoke("Name a place.")
    assert isinstance(place, Place)


def test_json_mode_is_json():
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answer = chat().bind(response_format={"type": "json_object", "schema": schema}).invoke("Answer in JSON: a city?")
    assert json.loads(answer.content)["city"] in {"Paris", "Rome"}


def test_log_probabilities_and_several_choices_are_told():
    answer = chat(max_tokens=3).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert all(len(each["top_logprobs"]) == 2 for each in answer.response_metadata["logprobs"]["content"])
    assert len(chat(max_tokens=3, n=2, temperature=1).generate([[HumanMessage(QUESTION)]]).generations[0]) == 2


def test_the_responses_api_answers_and_goes_on():
    model = chat(use_responses_api=True)
    first = model.invoke(QUESTION)
    assert "Paris" in first.text
    assert model.invoke("And of Italy?", previous_response_id=first.response_metadata["id"]).text
    assert "Paris" in "".join(chunk.text for chunk in model.stream(QUESTION))


def test_a_completion_goes_on():
    model = OpenAI(base_url=BASE_URL, api_key="none", model=MODELS[0], temperature=0, max_tokens=6, max_retries=0)
    assert "four" in model.invoke("One, two, three,")


def test_texts_become_vectors():
    embedding = next(each for each in MODELS if "minilm" in each.lower())
    # Otherwise it sends tokens of OpenAI's own models, which mean other words here.
    made = OpenAIEmbeddings(base_url=BASE_URL, api_key="none", model=embedding, check_embedding_ctx_length=False)
    one, other = made.embed_documents(["a cat", "a small feline"])
    assert sum(x * x for x in one) == pytest.approx(1, abs=1e-3)
    assert sum(x * y for x, y in zip(one, other, strict=True)) > 0.3
    assert made.embed_query("a cat") == pytest.approx(one, abs=1e-3)


def test_errors_are_the_sdk_s_own():
    with pytest.raises(openai.NotFoundError):
        chat(model="nobody").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(temperature=7).invoke(QUESTION)
