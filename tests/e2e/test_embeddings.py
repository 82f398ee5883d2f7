"""Vectors through the front door: the official OpenAI SDK, the legacy route, reranking; real Envoy, real model."""

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture
def client(mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.public_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(mesh) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=mesh.public_url, timeout=60) as client:
        yield client


def test_the_sdk_decodes_vectors_of_length_one_in_order(client):
    answer = client.embeddings.create(model=MODEL, input=["A cat sleeps.", "The cat is asleep.", "Shares fell."])
    vectors = np.array([each.embedding for each in answer.data])
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert vectors.shape == (3, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10


def test_numbers_and_base64_are_the_same_vector(client):
    numbers = client.embeddings.create(model=MODEL, input="A cat sleeps.", encoding_format="float")
    decoded = client.embeddings.create(model=MODEL, input="A cat sleeps.")
    assert np.allclose(numbers.data[0].embedding, decoded.data[0].embedding, atol=1e-6)


def test_dimensions_cut_the_vector(client):
    (each,) = client.embeddings.create(model=MODEL, input="A cat sleeps.", dimensions=64).data
    assert len(each.embedding) == 64
    assert abs(np.linalg.norm(each.embedding) - 1) < 1e-5


def test_256_inputs_fit_into_one_request_and_257_do_not(client):
    answer = client.embeddings.create(model=MODEL, input=[f"number {place}" for place in range(256)])
    assert len(answer.data) == 256
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=["a"] * 257)
    assert caught.value.body["param"] == "input"


def test_an_input_that_is_too_long_is_named_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=["fine", "word " * 600])
    assert caught.value.body["param"] == "input[1]"
    assert caught.value.code == "context_length_exceeded"
    assert "602" in caught.value.message
    assert "512" in caught.value.message


def test_a_model_that_generates_text_makes_no_vectors(client):
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as caught:
        client.embeddings.create(model="SmolLM2-135M-Instruct", input="a")
    assert caught.value.body["param"] == "model"


def test_the_model_is_listed_and_its_engine_shown(client, http):
    listed = {model.id: model for model in client.models.list()}
    assert listed[MODEL].omniserve["kind"] == "embedding"
    assert listed[MODEL].omniserve["embedding_dimensions"] == 384
    engines = {each["model"]: each for each in http.get("/status").json()["services"]["llm"]["engines"]}
    assert engines[MODEL]["state"] == "MODEL_STATE_READY"
    assert engines[MODEL]["placement"]["device"] == "cpu"


def test_the_default_model_of_a_chat_stays_the_one_that_generates(client):
    assert client.models.list().data[0].id != MODEL


def test_features_are_a_flat_vector_of_256_numbers_unless_told_otherwise(http):
    plain, fewer, all_ = (
        http.post("/api/v1/feature-extraction", json={"text": "A cat sleeps.", **fields}).json()
        for fields in ({}, {"num_features": 10}, {"num_features": 384})
    )
    assert len(plain) == 256
    assert fewer == plain[:10]
    assert plain == all_[:256]
    assert len(http.post("/api/v1/feature-extraction", json={"text": "word " * 600}).json()) == 256
    refused = http.post("/api/v1/feature-extraction", json={"text": "a", "num_features": 385})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "num_features"


def test_documents_come_back_best_first(http):
    body = {
        "query": "Which animal sleeps on the sofa?",
        "documents": ["Shares fell on Monday.", {"text": "The cat is asleep on the couch."}, "Bread is made of flour."],
        "return_documents": True,
        "top_n": 2,
    }
    answer = http.post("/v1/rerank", json=body).json()
    assert answer["results"][0]["index"] == 1
    assert answer["results"][0]["document"]["text"] == "The cat is asleep on the couch."
    assert len(answer["results"]) == 2
    assert answer["results"][0]["relevance_score"] > answer["results"][1]["relevance_score"]
    assert answer["usage"]["total_tokens"] > 20
