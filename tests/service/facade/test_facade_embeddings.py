"""The routes of vectors over a scripted llm."""

import asyncio
import base64

import httpx
import numpy as np
import pytest


async def test_vectors_come_as_numbers_with_the_model_and_what_was_used(mesh):
    answer = await mesh.http.post("/v1/embeddings", json={"input": ["a", "bb"], "user": "u"})
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [2.0, 0.5]},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


async def test_base64_is_that_of_32_bit_floats(mesh):
    answer = await mesh.http.post("/v1/embeddings", json={"input": "abc", "encoding_format": "base64"})
    (each,) = answer.json()["data"]
    assert np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() == [3.0, 0.5]


async def test_the_request_reaches_llm_as_its_caller_meant_it(mesh):
    headers = {"x-omniserve-client": "alice", "x-omniserve-tier": "paid"}
    body = {"input": [[1, 2], [3]], "dimensions": 2, "model": "tiny"}
    await mesh.http.post("/v1/embeddings", json=body, headers=headers)
    (request,) = mesh.llm.embedded
    assert [list(each.tokens.ids) for each in request.inputs] == [[1, 2], [3]]
    assert (request.dimensions, request.model, request.raw, request.truncate) == (2, "tiny", False, False)
    assert ("facade", "alice", "paid") in mesh.llm.callers


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/embeddings", {"input": "x" * 65}, "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": ["a", "x" * 65]}, "input[1]", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions", "invalid_request"),
        ("/api/v1/feature-extraction", {"text": "x" * 65}, "text", "context_length_exceeded"),
        ("/api/v1/feature-extraction", {"text": "a", "num_features": 3}, "num_features", "invalid_request"),
    ],
)
async def test_what_llm_refuses_is_told_with_the_callers_own_names(mesh, path, body, param, code):
    answer = await mesh.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == (param, code)
    assert f"'{param}'" in error["message"]


async def test_features_are_one_flat_vector(mesh):
    answer = await mesh.http.post("/api/v1/feature-extraction", json={"text": "abcd"})
    assert answer.json() == [4.0, 0.5]


async def test_results_are_best_first_and_bring_their_documents_when_asked(mesh):
    body = {"query": "q", "documents": ["a", {"text": "bbb"}, "cc"], "top_n": 2, "return_documents": True}
    answer = await mesh.http.post("/v1/rerank", json=body, headers={"x-request-id": "r-1"})
    assert answer.json() == {
        "id": "rerank-r-1",
        "object": "list",
        "model": "tiny",
        "results": [
            {"index": 1, "relevance_score": 3.0, "document": {"text": "bbb"}},
            {"index": 2, "relevance_score": 2.0, "document": {"text": "cc"}},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


async def test_a_caller_who_hangs_up_ends_the_call_to_llm(mesh):
    with pytest.raises(httpx.ReadTimeout):
        await mesh.http.post("/v1/embeddings", json={"input": "hang"}, timeout=0.3)
    async with asyncio.timeout(20):
        await mesh.llm.left.wait()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/v1/feature-extraction", "/v1/rerank"])
async def test_the_routes_are_described(mesh, path):
    description = (await mesh.http.get("/openapi.json")).json()
    body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "model" in body["properties"]
