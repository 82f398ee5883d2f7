import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from facade.translate.embeddings import embedding_list, read_embeddings
from facade.translate.features import features, read_features
from facade.translate.features import rest_field as features_field
from facade.translate.rerank import ranking, read_rerank
from facade.translate.vectors import numbers, raw_floats
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError


def refused_field(read, body) -> str | None:
    with pytest.raises(DomainError) as caught:
        read(body)
    assert caught.value.field in caught.value.message
    return caught.value.field


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=600))
def test_the_numbers_of_a_vector_come_out_as_they_went_in(values) -> None:
    vector = llm_pb2.Vector(values=values)
    assert raw_floats(vector) == np.asarray(values, "<f4").tobytes()
    assert numbers(vector).tolist() == list(vector.values)


def test_every_form_of_input_is_read() -> None:
    assert [each.text for each in read_embeddings({"input": "a"}).request.inputs] == ["a"]
    assert [each.text for each in read_embeddings({"input": ["a", "b"]}).request.inputs] == ["a", "b"]
    assert [list(e.tokens.ids) for e in read_embeddings({"input": [1, 2]}).request.inputs] == [[1, 2]]
    assert [list(e.tokens.ids) for e in read_embeddings({"input": [[1], [2, 3]]}).request.inputs] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": True}, "input"),
        ({"input": [True]}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": ["a", []]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": [[1], [2, 1.5]]}, "input[1][1]"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": [[1]] * 257}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": 3}, "model"),
        ({"input": "a", "inputs": "b"}, "inputs"),
    ],
)
def test_malformed_embedding_requests_are_refused_by_field(body, field) -> None:
    assert refused_field(read_embeddings, body) == field


@pytest.mark.parametrize(
    ("body", "theirs", "ours"),
    [
        ({"input": "a"}, "inputs[0]", "input"),
        ({"input": [5]}, "inputs[0][0]", "input[0]"),
        ({"input": ["a"]}, "inputs[0]", "input[0]"),
        ({"input": [[5]]}, "inputs[0][0]", "input[0][0]"),
        ({"input": "a"}, "inputs", "input"),
        ({"input": "a"}, "dimensions", "dimensions"),
    ],
)
def test_fields_of_the_contract_have_the_names_that_the_caller_used(body, theirs, ours) -> None:
    assert read_embeddings(body).rest_field(theirs) == ours


def test_vectors_are_written_as_numbers_or_as_base64_of_their_bytes() -> None:
    response = llm_pb2.EmbedResponse(
        vectors=[llm_pb2.Vector(values=[0.5, -1.0]), llm_pb2.Vector(values=[1.0, 2.0])], prompt_tokens=9, model="m"
    )
    plain = embedding_list(response, as_base64=False)
    assert [each["embedding"].tolist() for each in plain["data"]] == [[0.5, -1.0], [1.0, 2.0]]
    assert [each["index"] for each in plain["data"]] == [0, 1]
    assert plain["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    encoded = embedding_list(response, as_base64=True)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == [0.5, -1.0]


def test_features_are_raw_and_at_most_256_unless_more_are_asked_for() -> None:
    request = read_features({"text": "a"})
    assert request.raw
    assert request.truncate
    assert not request.HasField("dimensions")
    wide, narrow = (llm_pb2.EmbedResponse(vectors=[llm_pb2.Vector(values=range(n))]) for n in (384, 100))
    assert len(features(request, wide)) == 256
    assert len(features(request, narrow)) == 100
    asked = read_features({"inputs": "a", "num_features": 300, "truncation": False})
    assert asked.dimensions == 300
    assert not asked.truncate
    assert len(features(asked, wide)) == 384  # as many as llm gives


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": ["a"]}, "text"),
        ({"text": "a", "inputs": "b"}, "inputs"),
        ({"text": "a", "num_features": 0}, "num_features"),
        ({"text": "a", "num_features": "all"}, "num_features"),
        ({"text": "a", "truncation": "yes"}, "truncation"),
    ],
)
def test_malformed_feature_requests_are_refused_by_field(body, field) -> None:
    assert refused_field(read_features, body) == field


def test_fields_of_features_have_their_own_names() -> None:
    assert features_field("inputs[0]") == "text"
    assert features_field("dimensions") == "num_features"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": "a"}, "documents"),
        ({"query": "q", "documents": ["a"] * 1001}, "documents"),
        ({"query": "q", "documents": ["a", 3]}, "documents[1]"),
        ({"query": "q", "documents": [{"txt": "a"}]}, "documents[0].txt"),
        ({"query": "q", "documents": [{}]}, "documents[0].text"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "texts": ["a"]}, "texts"),
        ({"query": "q", "texts": [{"text": "a"}]}, "texts[0]"),
        ({"query": "q", "documents": ["a"], "return_documents": 1}, "return_documents"),
    ],
)
def test_malformed_rerank_requests_are_refused_by_field(body, field) -> None:
    assert refused_field(read_rerank, body) == field


def test_results_bring_their_documents_only_when_asked() -> None:
    response = llm_pb2.RerankResponse(
        results=[llm_pb2.RankedDocument(index=1, score=0.5), llm_pb2.RankedDocument(index=0, score=0.25)],
        prompt_tokens=7,
        model="m",
    )
    body = {"query": "q", "documents": ["a", {"text": "b"}]}
    assert ranking(read_rerank(body), response, "rerank-1")["results"] == [
        {"index": 1, "relevance_score": 0.5},
        {"index": 0, "relevance_score": 0.25},
    ]
    told = ranking(read_rerank({**body, "return_documents": True}), response, "rerank-1")
    assert [each["document"]["text"] for each in told["results"]] == ["b", "a"]
    assert told["usage"]["total_tokens"] == 7


def test_texts_are_ranked_in_the_shape_of_text_embeddings_inference() -> None:
    response = llm_pb2.RerankResponse(results=[llm_pb2.RankedDocument(index=1, score=0.5)], model="m")
    body = {"query": "q", "texts": ["a", "b"], "top_n": 1}
    assert list(read_rerank(body).request.documents) == ["a", "b"]
    assert ranking(read_rerank(body), response, "rerank-1") == [{"index": 1, "score": 0.5}]
    assert ranking(read_rerank({**body, "return_text": True}), response, "rerank-1") == [
        {"index": 1, "score": 0.5, "text": "b"}
    ]
