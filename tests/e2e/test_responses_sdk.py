"""The Responses API by the official OpenAI SDK: real Envoy, real model, real journal."""

import httpx
import openai
import pytest


@pytest.fixture
def client(mesh):
    with openai.OpenAI(base_url=f"{mesh.public_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client) -> str:
    return client.models.list().data[0].id


def jobs_serve(mesh) -> bool:
    services = httpx.get(f"{mesh.public_url}/health", timeout=60).json()["services"]
    return services["jobs"]["status"] == "serving"


def test_a_response_answers_paris_and_the_conversation_goes_on_after_a_restart_of_jobs(client, model, mesh, wait_until):
    first = client.responses.create(
        model=model, input="What is the capital of France?", temperature=0, max_output_tokens=32
    )
    assert "Paris" in first.output_text
    assert first.status == "completed"
    mesh.restart("jobs")
    wait_until(lambda: jobs_serve(mesh), "jobs serves again")  # readiness does not wait for it
    second = client.responses.create(
        model=model,
        input="Repeat your last answer.",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=32,
    )
    assert "Paris" in second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.input_items.list(second.id).data[0].content[0].text == "Repeat your last answer."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).id == second.id


def test_a_streamed_response_is_the_one_that_is_kept(client, model):
    question = "What is the capital of France?"
    with client.responses.stream(model=model, input=question, temperature=0, max_output_tokens=64) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    kept = client.responses.retrieve(final.id)
    assert kept.output_text == final.output_text
    with client.responses.retrieve(final.id, stream=True) as again:
        last = list(again)[-1]
    assert last.response.output_text == final.output_text


def test_input_items_are_paged(client, model):
    said = [{"role": "user", "content": f"Number {number}."} for number in range(5)]
    response = client.responses.create(model=model, input=said, max_output_tokens=4)
    items = client.responses.input_items.list(response.id, limit=2, order="asc")
    assert [item.content[0].text for item in items] == [f"Number {number}." for number in range(5)]


def test_what_is_unsupported_is_refused_by_its_name(client, model, mesh):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, input="x", background=True)
    assert refused.value.param == "background"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, input="word " * 20_000)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model=model, input="x", previous_response_id="resp_unknown")
    assert refused.value.param == "previous_response_id"
    cancelled = httpx.post(f"{mesh.public_url}/v1/responses/resp_x/cancel", json={}, timeout=60)
    assert cancelled.status_code == 400
