import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.errors import DomainError, Reason
from services.llm.core.embedding import (
    EmbedWork,
    Input,
    PairEnds,
    RerankWork,
    best,
    by_similarity,
    check_embed,
    check_rerank,
    cut_to,
    floats,
    normalised,
    pair_tokens,
    shaped,
    unfit,
)

rows = st.integers(1, 8).flatmap(
    lambda count: st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=6), min_size=count, max_size=count
    )
)


def embed(*inputs: Input, dimensions: int | None = None) -> EmbedWork:
    return EmbedWork("", inputs, dimensions, truncate=False, raw=False)


def refusal(call, *arguments, **options) -> DomainError:
    with pytest.raises(DomainError) as caught:
        call(*arguments, **options)
    return caught.value


LIMITS = {"vocabulary": 100, "width": 8, "prompt_bytes": 1000}


@pytest.mark.parametrize(
    ("work", "field", "reason"),
    [
        (embed(), "inputs", Reason.INVALID_REQUEST),
        (embed(*[Input("a")] * 257), "inputs", Reason.INVALID_REQUEST),
        (embed(Input("a"), Input("b" * 1000)), "inputs", Reason.TOO_LARGE),
        (embed(Input("a"), Input(tokens=(3, 100))), "inputs[1][1]", Reason.INVALID_REQUEST),
        (embed(Input(tokens=(-1,))), "inputs[0][0]", Reason.INVALID_REQUEST),
        (embed(Input("a"), dimensions=9), "dimensions", Reason.INVALID_REQUEST),
        (embed(Input("a"), dimensions=0), "dimensions", Reason.INVALID_REQUEST),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_field(work, field, reason) -> None:
    error = refusal(check_embed, work, **LIMITS)
    assert (error.field, error.reason) == (field, reason)
    assert f"'{field}'" in error.message


def test_256_inputs_with_all_dimensions_are_fine() -> None:
    check_embed(embed(*[Input("a")] * 255, Input(tokens=(0, 99)), dimensions=8), **LIMITS)


@pytest.mark.parametrize(
    ("work", "field"),
    [
        (RerankWork("", "", ("a",), None), "query"),
        (RerankWork("", "q", (), None), "documents"),
        (RerankWork("", "q", ("a",) * 1001, None), "documents"),
        (RerankWork("", "q", ("a" * 1000,), None), "documents"),
        (RerankWork("", "q", ("a",), 0), "top_n"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_its_field(work, field) -> None:
    error = refusal(check_rerank, work, prompt_bytes=1000)
    assert error.field == field
    assert f"'{field}'" in error.message


def test_a_thousand_documents_are_fine_and_top_n_may_be_more() -> None:
    check_rerank(RerankWork("", "q", ("a",) * 1000, 5000), prompt_bytes=10_000)


def test_an_input_that_is_too_long_is_refused_with_both_numbers_and_an_empty_one_as_empty() -> None:
    error = unfit("inputs[3]", tokens=600, limit=512)
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert {"600", "512", "'inputs[3]'"} <= set(error.message.replace(";", "").split())
    assert error.metadata == {"prompt_tokens": "600", "context_tokens": "512"}
    assert unfit("inputs[3]", tokens=0, limit=512).reason is Reason.INVALID_REQUEST


@given(st.lists(st.integers(0, 50), min_size=2, max_size=40), st.integers(1, 40))
def test_a_cut_input_keeps_its_beginning_and_its_closing_token(tokens, limit) -> None:
    ends = {7}
    cut = cut_to(np.array(tokens, np.int32), limit, ends=ends).tolist()
    assert len(cut) <= limit
    if tokens[-1] in ends:
        assert cut[-1] == tokens[-1]
        assert cut[:-1] == tokens[: len(cut) - 1]
    else:
        assert cut == tokens[:limit]


def test_a_pair_stands_between_the_tokens_that_the_model_wants() -> None:
    ends = PairEnds(before=(1,), between=(2, 3), after=(2,))
    assert pair_tokens([10, 11], [20], ends) == [1, 10, 11, 2, 3, 20, 2]


@given(rows, st.integers(1, 6))
def test_cut_vectors_have_length_one_again_unless_they_are_wanted_raw(values, dimensions) -> None:
    vectors = np.array(values, np.float32)
    lengths = np.linalg.norm(shaped(vectors, dimensions=dimensions, raw=False), axis=1)
    assert all(abs(length - 1) < 1e-5 or length == 0 for length in lengths)
    assert np.array_equal(shaped(vectors, dimensions=dimensions, raw=True), vectors[:, :dimensions])
    assert np.array_equal(shaped(vectors, dimensions=None, raw=True), vectors)


@given(rows)
def test_similarity_is_the_cosine_and_zeros_are_like_nothing(values) -> None:
    vectors = np.array(values, np.float32)
    scores = by_similarity(vectors)
    assert len(scores) == len(vectors) - 1
    assert all(-1.0001 <= score <= 1.0001 for score in scores)
    assert np.isfinite(normalised(vectors)).all()


@given(st.lists(st.sampled_from([0.1, 0.5, 0.9]), min_size=1, max_size=20), st.one_of(st.none(), st.integers(1, 25)))
def test_the_best_come_first_and_equals_in_the_order_of_the_request(scores, top_n) -> None:
    ranked = best(scores, top_n)
    assert len(ranked) == min(len(scores), top_n or len(scores))
    keys = [(-each.score, each.index) for each in ranked]
    assert keys == sorted(keys)
    assert all(scores[each.index] == each.score for each in ranked)


def test_vectors_travel_as_bytes() -> None:
    vectors = np.arange(6, dtype="<f4").reshape(2, 3)
    assert np.array_equal(floats(vectors.tobytes(), 3), vectors)
