"""BERT encoders of sentence-transformers (config.json, vocab.txt, safetensors) as llama.cpp wants them.

The names of tensors and metadata are those of GGUF's architecture `bert`; llama.cpp's WordPiece tokenizer wants `##` cut from
pieces that continue a word, and U+2581 in front of those that begin one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_OUTER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "embeddings.word_embeddings.weight": "token_embd.weight",
        "embeddings.position_embeddings.weight": "position_embd.weight",
        "embeddings.token_type_embeddings.weight": "token_types.weight",
        "embeddings.LayerNorm.weight": "token_embd_norm.weight",
        "embeddings.LayerNorm.bias": "token_embd_norm.bias",
    }
)
_INNER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attention.self.query": "attn_q",
        "attention.self.key": "attn_k",
        "attention.self.value": "attn_v",
        "attention.output.dense": "attn_output",
        "attention.output.LayerNorm": "attn_output_norm",
        "intermediate.dense": "ffn_up",
        "output.dense": "ffn_down",
        "output.LayerNorm": "layer_output_norm",
    }
)
# What a checkpoint has beyond the encoder: sentence vectors are pooled from the last layer, without BERT's own head.
_UNUSED: Final = ("embeddings.position_ids", "pooler.", "cls.")
# Added to every token, a row each: too small to be worth rounding.
_WHOLE: Final = frozenset({"position_embd.weight", "token_types.weight"})
_WORD_BEGINS: Final = "\u2581"


class ConvertError(Exception):
    """Weights that are not what they should be; the message names what is missing or unknown."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The encoder's sizes, as its config.json has them."""

    layers: int
    width: int
    inner_width: int
    heads: int
    positions: int
    token_types: int
    vocabulary: int
    norm_epsilon: float


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; `control` ones never come from plain text."""

    text: str
    control: bool


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Return the sizes. Raises ConvertError when it is no BERT with absolute positions."""
    kind, positions = config.get("model_type"), config.get("position_embedding_type", "absolute")
    if kind != "bert" or positions != "absolute":
        raise ConvertError(
            f"config.json describes {kind!r} with {positions!r} positions, not 'bert' with 'absolute' ones"
        )
    try:
        return Shape(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            inner_width=config["intermediate_size"],
            heads=config["num_attention_heads"],
            positions=config["max_position_embeddings"],
            token_types=config["type_vocab_size"],
            vocabulary=config["vocab_size"],
            norm_epsilon=config["layer_norm_eps"],
        )
    except KeyError as missing:
        raise ConvertError(f"config.json lacks {missing}") from None


def read_vocabulary(text: str, shape: Shape) -> tuple[Piece, ...]:
    """Return the entries of vocab.txt in their order. Raises ConvertError when there are fewer than the weights have."""
    lines = text.split("\n")[: shape.vocabulary]
    if len(lines) < shape.vocabulary:
        raise ConvertError(f"vocab.txt has {len(lines)} entries; the weights have {shape.vocabulary}")
    return tuple(_piece(line.rstrip("\r")) for line in lines)


def _piece(entry: str) -> Piece:
    if entry.startswith("[") and entry.endswith("]") and not entry.startswith("[unused"):
        return Piece(entry, control=True)
    return Piece(entry.removeprefix("##") if entry.startswith("##") else _WORD_BEGINS + entry, control=False)


def place(pieces: Sequence[Piece], text: str) -> int:
    """Return the number of a control entry. Raises ConvertError when the vocabulary has none."""
    for number, piece in enumerate(pieces):
        if piece.control and piece.text == text:
            return number
    raise ConvertError(f"vocab.txt has no {text}")


def tensors(weights: Mapping[str, Array], shape: Shape) -> Iterator[tuple[str, npt.NDArray[np.float32], bool]]:
    """Yield name, values and whether they may be quantised. Raises ConvertError when one is missing or unknown."""
    found = {name: _name(name.removeprefix("bert.")) for name in sorted(weights)}
    missing = set(_wanted(shape)) - set(found.values())
    if missing:
        raise ConvertError(f"the weights lack {len(missing)} tensors, {min(missing)} among them")
    for theirs, ours in found.items():
        if ours is not None:
            values = weights[theirs].astype(np.float32)
            yield ours, values, values.ndim == 2 and ours not in _WHOLE


def _wanted(shape: Shape) -> Iterator[str]:
    yield from _OUTER.values()
    for layer in range(shape.layers):
        yield from (f"blk.{layer}.{part}.{kind}" for part in _INNER.values() for kind in ("weight", "bias"))


def _name(theirs: str) -> str | None:
    if theirs.startswith(_UNUSED):
        return None
    if theirs in _OUTER:
        return _OUTER[theirs]
    layer, _, rest = theirs.removeprefix("encoder.layer.").partition(".")
    part, _, kind = rest.rpartition(".")
    if part not in _INNER or not layer.isdecimal():
        raise ConvertError(f"unknown tensor {theirs}")
    return f"blk.{layer}.{_INNER[part]}.{kind}"
