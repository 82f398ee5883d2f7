"""The official Anthropic SDK against the front door: real Envoy, real model."""

import anthropic
import httpx
import pytest

# Newer versions of the SDK have no parameters for sampling, but send what they are given.
COLD = {"temperature": 0}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(mesh):
    with anthropic.Anthropic(base_url=mesh.public_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(mesh) -> str:
    return httpx.get(f"{mesh.public_url}/v1/models", timeout=60).json()["data"][0]["id"]


def test_a_message_answers_paris_and_the_cache_is_told(client, model):
    asked = {"model": model, "messages": QUESTION, "max_tokens": 32, "extra_body": COLD, "system": "Answer correctly."}
    first = client.messages.create(**asked)
    assert "Paris" in first.content[0].text
    assert first.stop_reason == "end_turn"
    again = client.messages.create(**asked)
    counted = client.messages.count_tokens(model=model, messages=QUESTION, system="Answer correctly.")
    assert again.usage.cache_read_input_tokens > 0
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == counted.input_tokens


def test_a_streamed_message_says_the_same_as_a_whole_one(client, model):
    asked = {"model": model, "messages": QUESTION, "max_tokens": 32, "extra_body": COLD}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_a_stop_sequence_ends_the_text_and_a_begun_answer_is_continued(client, model):
    answer = client.messages.create(
        model=model,
        messages=[{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, three,"}],
        max_tokens=32,
        extra_body=COLD,
        stop_sequences=["six"],
    )
    assert "five" in answer.content[0].text
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "six")


def test_errors_are_the_sdks_own(client, model):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="no-such-model", messages=QUESTION, max_tokens=4)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=model, messages=QUESTION, max_tokens=4, extra_body={"temperature": 9})
    assert "'temperature'" in refused.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError, match=r"messages.*context"):
        client.messages.create(model=model, messages=[{"role": "user", "content": "word " * 20_000}], max_tokens=4)


def test_an_image_is_refused_clearly_by_a_model_that_reads_text_only(client, model):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "cG5n"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\].*text only"):
        client.messages.create(
            model=model,
            messages=[{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}],
            max_tokens=4,
        )
