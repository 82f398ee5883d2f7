"""The text-generator routes and the older completions route through the whole mesh."""

import httpx
import openai
import pytest

TEXT = "The capital of France is Paris. The capital of Italy is"


@pytest.fixture
def post(mesh):
    def send(path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{mesh.public_url}{path}", json=body, timeout=60)

    return send


def test_the_playgrounds_request_gets_one_result(post):
    answer = post(
        "/api/v1/generate",
        text="Hi I am bored so looking",
        number_of_results=1,
        max_length=100,
        max_sentences=1,
        min_probability=0.7,
        model="best",
        enable_thinking=False,
    )
    assert answer.status_code == 200, answer.text
    (result,) = answer.json()
    assert "<think" not in result["generated_text"]
    assert result["stop_reason"] in {"min_probability", "max_sentences", "max_length", "end_of_text"}


@pytest.mark.parametrize("path", ["/api/v1/generate", "/api/v1/generate-large"])
def test_a_text_is_continued_to_the_end_of_its_sentence(post, path):
    answer = post(path, text=TEXT, max_length=60, max_sentences=1, temperature=0)
    (result,) = answer.json()
    assert "Rome" in result["generated_text"]
    assert result["generated_text"].endswith(".")
    assert result["stop_reason"] == "max_sentences"
    assert result["usage"]["completion_tokens"] < 60


def test_several_results_and_stop_sequences(post):
    answer = post(
        "/api/v1/generate",
        text="One, two, three,",
        number_of_results=2,
        stop_sequences=["six"],
        temperature=0,
        max_length=40,
    )
    for result in answer.json():
        assert "five" in result["generated_text"]
        assert (result["stop_reason"], result["stop_sequence"]) == ("stop_sequences", "six")


def test_autocomplete_is_short(post):
    (result,) = post("/api/v1/autocomplete", text=TEXT, temperature=0).json()
    assert "Rome" in result["generated_text"]
    assert result["usage"]["completion_tokens"] <= 16


def test_a_summary_is_a_text(post):
    answer = post("/api/v1/summarization", text=f"{TEXT} Rome. Both are old and large.", max_length=40)
    assert set(answer.json()) == {"generated_text"}
    assert answer.json()["generated_text"]


@pytest.mark.parametrize("path", ["generate", "generate-large", "autocomplete", "summarization"])
def test_a_text_longer_than_the_context_is_refused_by_its_name(post, path):
    answer = post(f"/api/v1/{path}", text="word " * 20_000)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "text")


def test_the_older_completions_route_takes_its_model_from_the_path(post, mesh):
    model = httpx.get(f"{mesh.public_url}/v1/models", timeout=60).json()["data"][0]["id"]
    with openai.OpenAI(base_url=f"{mesh.public_url}/v1/engines/{model}", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model=model, prompt="One, two, three,", temperature=0, max_tokens=8)
    assert "four" in answer.choices[0].text
    refused = post("/v1/engines/no-such-engine/completions", prompt="x")
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
