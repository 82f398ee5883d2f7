"""Embeddings and reranking: what may be asked, how inputs become tokens, and what becomes of vectors."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.kit.errors import DomainError, Reason

MOST_INPUTS: Final = 256
MOST_DOCUMENTS: Final = 1000

Vectors = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Input:
    """One thing to embed: a text, or tokens of the model's vocabulary."""

    text: str = ""
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class EmbedWork:
    """What Embed is asked for."""

    model: str
    inputs: tuple[Input, ...]
    dimensions: int | None
    truncate: bool
    raw: bool


@dataclass(frozen=True, slots=True)
class RerankWork:
    """What Rerank is asked for."""

    model: str
    query: str
    documents: tuple[str, ...]
    top_n: int | None


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document by its place in the request, with its score."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class PairEnds:
    """The tokens that a cross-encoder wants before, between and after a query and a document."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]


# ---- what may be asked ---------------------------------------------------------------------------------------


def check_embed(work: EmbedWork, *, vocabulary: int, width: int, prompt_bytes: int) -> None:
    """Raise DomainError naming the field for what cannot be embedded, whatever its text."""
    _check_count("inputs", len(work.inputs), MOST_INPUTS)
    _check_size("inputs", sum(len(each.text) for each in work.inputs), prompt_bytes)
    for place, each in enumerate(work.inputs):
        if each.tokens is not None:
            _check_tokens(f"inputs[{place}]", each.tokens, vocabulary)
    if work.dimensions is not None and not 1 <= work.dimensions <= width:
        message = f"'dimensions' is {work.dimensions}; vectors of this model have {width}"
        raise DomainError(Reason.INVALID_REQUEST, message, field="dimensions")


def check_rerank(work: RerankWork, *, prompt_bytes: int) -> None:
    """Raise DomainError naming the field for what cannot be ranked."""
    if not work.query:
        raise DomainError(Reason.INVALID_REQUEST, "'query' must not be empty", field="query")
    _check_count("documents", len(work.documents), MOST_DOCUMENTS)
    _check_size("documents", sum(len(each) for each in (work.query, *work.documents)), prompt_bytes)
    if work.top_n is not None and work.top_n < 1:
        raise DomainError(Reason.INVALID_REQUEST, f"'top_n' is {work.top_n}; it must be at least 1", field="top_n")


def _check_count(field: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise DomainError(Reason.INVALID_REQUEST, f"'{field}' must have 1 to {most} items, not {count}", field=field)


def _check_size(field: str, size: int, most: int) -> None:
    if size > most:
        message = f"'{field}' has {size} characters; the most is {most}"
        raise DomainError(Reason.TOO_LARGE, message, field=field)


def _check_tokens(field: str, tokens: Sequence[int], vocabulary: int) -> None:
    for place, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            message = f"'{field}[{place}]' is {token}; tokens of this model are 0 to {vocabulary - 1}"
            raise DomainError(Reason.INVALID_REQUEST, message, field=f"{field}[{place}]")


def unfit(field: str, *, tokens: int, limit: int) -> DomainError:
    """Return the refusal of an input that has no tokens or too many."""
    if tokens == 0:
        return DomainError(Reason.INVALID_REQUEST, f"'{field}' is empty: it has no tokens", field=field)
    return DomainError(
        Reason.CONTEXT_LENGTH_EXCEEDED,
        f"'{field}' has {tokens} tokens; one input of this model has at most {limit}",
        field=field,
        metadata={"prompt_tokens": str(tokens), "context_tokens": str(limit)},
    )


# ---- inputs become tokens ------------------------------------------------------------------------------------


def cut_to(tokens: Tokens, limit: int, *, ends: Collection[int]) -> Tokens:
    """Return the first tokens; a token of `ends` that closes the whole closes what is left too."""
    last = int(tokens[-1])
    if last in ends:
        return np.append(tokens[: limit - 1], np.int32(last))
    return tokens[:limit]


def pair_tokens(query: Sequence[int], document: Sequence[int], ends: PairEnds) -> list[int]:
    """Return what a cross-encoder reads to score a document, as llama-server builds it."""
    return [*ends.before, *query, *ends.between, *document, *ends.after]


# ---- what becomes of vectors ---------------------------------------------------------------------------------


def shaped(vectors: Vectors, *, dimensions: int | None, raw: bool) -> Vectors:
    """Return the vectors cut to their first `dimensions`, and of length 1 unless `raw`.

    A prefix of a vector is a vector for models trained that way (Matryoshka representation learning, Kusupati et al. 2022);
    it has to be normalised again.
    """
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    return np.ascontiguousarray(cut) if raw else normalised(cut)


def normalised(vectors: Vectors) -> Vectors:
    """Return the rows with length 1; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0, 1, lengths), np.float32)


def by_similarity(vectors: Vectors) -> list[float]:
    """Return the cosine of each row after the first with the first."""
    unit = normalised(vectors)
    return [float(score) for score in unit[1:] @ unit[0]]


def best(scores: Sequence[float], top_n: int | None) -> list[Ranked]:
    """Return the documents by falling score, equal ones in the order of the request; the first `top_n` of them."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [Ranked(index, scores[index]) for index in order[:top_n]]


def floats(data: bytes, width: int) -> Vectors:
    """Return vectors that have travelled as raw bytes, a row each."""
    return np.frombuffer(data, "<f4").reshape(-1, width)
