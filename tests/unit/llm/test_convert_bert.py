import numpy as np
import pytest

from services.llm.convert.bert import ConvertError, Piece, place, read_shape, read_vocabulary, tensors

CONFIG = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "vocab_size": 5,
    "layer_norm_eps": 1e-12,
}
VOCABULARY = "[CLS]\n[SEP]\n[unused1]\nhello\n##ing\n"
PARTS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


def weights() -> dict[str, np.ndarray]:
    outer = {
        f"embeddings.{name}": np.ones((2, 4), np.float16)
        for name in ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight")
    }
    norms = {f"embeddings.LayerNorm.{kind}": np.ones(4, np.float16) for kind in ("weight", "bias")}
    inner = {
        f"encoder.layer.0.{part}.{kind}": np.ones((4, 4) if kind == "weight" and "Norm" not in part else 4, np.float16)
        for part in PARTS
        for kind in ("weight", "bias")
    }
    unused = {"embeddings.position_ids": np.ones(4), "pooler.dense.weight": np.ones((4, 4))}
    return {**outer, **norms, **inner, **unused}


def test_the_sizes_are_those_of_the_config() -> None:
    shape = read_shape(CONFIG)
    assert (shape.layers, shape.width, shape.positions, shape.vocabulary) == (1, 4, 16, 5)


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "model_type": "roberta"},
        {**CONFIG, "position_embedding_type": "relative_key"},
        {name: value for name, value in CONFIG.items() if name != "hidden_size"},
    ],
)
def test_what_is_no_bert_with_absolute_positions_is_refused(config) -> None:
    with pytest.raises(ConvertError, match=r"config\.json"):
        read_shape(config)


def test_words_and_the_pieces_that_continue_them_are_told_apart() -> None:
    pieces = read_vocabulary(VOCABULARY, read_shape(CONFIG))
    assert pieces == (
        Piece("[CLS]", control=True),
        Piece("[SEP]", control=True),
        Piece("▁[unused1]", control=False),
        Piece("▁hello", control=False),
        Piece("ing", control=False),
    )
    assert place(pieces, "[SEP]") == 1
    with pytest.raises(ConvertError, match="MASK"):
        place(pieces, "[MASK]")


def test_a_vocabulary_shorter_than_the_weights_is_refused() -> None:
    with pytest.raises(ConvertError, match="has 2 entries"):
        read_vocabulary("[CLS]\n[SEP]", read_shape(CONFIG))


def test_matrices_may_be_quantised_and_norms_positions_and_types_may_not() -> None:
    found = {name: quantise for name, _, quantise in tensors(weights(), read_shape(CONFIG))}
    assert len(found) == 5 + 2 * len(PARTS)
    assert found["token_embd.weight"]
    assert found["blk.0.ffn_up.weight"]
    assert not any(found[name] for name in ("position_embd.weight", "token_types.weight", "blk.0.attn_q.bias"))


def test_names_may_have_the_models_own_prefix() -> None:
    prefixed = {f"bert.{name}": values for name, values in weights().items()}
    assert [each[0] for each in tensors(prefixed, read_shape(CONFIG))] == [
        each[0] for each in tensors(weights(), read_shape(CONFIG))
    ]


def test_missing_and_unknown_tensors_are_refused() -> None:
    missing = weights()
    del missing["encoder.layer.0.output.dense.bias"]
    with pytest.raises(ConvertError, match=r"lack 1 tensors, blk\.0\.ffn_down\.bias"):
        list(tensors(missing, read_shape(CONFIG)))
    with pytest.raises(ConvertError, match=r"encoder\.layer\.0\.adapter"):
        list(tensors({**weights(), "encoder.layer.0.adapter.weight": np.ones(1)}, read_shape(CONFIG)))
