"""POST /v1/embeddings: texts or tokens in, vectors out as numbers or as base64 of their bytes."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from facade.translate.fields import Choice, Custom, Integer, Text, check_length, refuse, wrong_type
from facade.translate.messages import TOKEN
from facade.translate.record import Field, record
from facade.translate.vectors import numbers, raw_floats
from omniserve.llm.v1 import llm_pb2

MAX_INPUTS = 256
# Wider than any model's vectors; the model's own width is checked where it is known.
MOST_DIMENSIONS = 65_536
MODEL = Field("model", Text(1, 256), "Catalogue name or alias; absent means the default model for this.")
USER = {"user": "Accepted and not used."}


@dataclass(frozen=True, slots=True)
class EmbeddingsCall:
    """What is asked for. `single`: one input that was not given as an array of inputs."""

    request: llm_pb2.EmbedRequest
    base64: bool
    single: bool

    def rest_field(self, path: str) -> str:
        """Return the REST name of a field that the contract names by its path."""
        if self.single and path.startswith("inputs[0]"):
            return "input" + path.removeprefix("inputs[0]")
        return "input" + path.removeprefix("inputs") if path.startswith("inputs") else path


def read_input(value: object, path: str) -> tuple[list[llm_pb2.EmbedInput], bool]:
    """Read a text, a token sequence, or an array of either; and whether it is just one."""
    if isinstance(value, str):
        return [_text(value, path)], True
    if not isinstance(value, list):
        wrong_type(path, "a string, an array of strings, an array of tokens, or an array of arrays of tokens", value)
    check_length(value, path, 1, None)
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_tokens(value, path)], True
    check_length(value, path, 1, MAX_INPUTS)
    return [_one(item, f"{path}[{index}]") for index, item in enumerate(value)], False


def _one(value: object, path: str) -> llm_pb2.EmbedInput:
    if isinstance(value, str):
        return _text(value, path)
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of tokens", value)
    check_length(value, path, 1, None)
    return _tokens(value, path)


def _text(value: str, path: str) -> llm_pb2.EmbedInput:
    if not value:
        refuse(path, "must not be empty", code="string_below_min_length")
    return llm_pb2.EmbedInput(text=value)


def _tokens(value: list[object], path: str) -> llm_pb2.EmbedInput:
    ids = [TOKEN.read(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return llm_pb2.EmbedInput(tokens=llm_pb2.Tokens(ids=ids))


_TOKENS_SCHEMA = {"type": "array", "minItems": 1, "items": TOKEN.schema()}
_INPUT_SCHEMA = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"type": "string", "minLength": 1}},
        _TOKENS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TOKENS_SCHEMA},
    ]
}
EMBEDDINGS = record(
    (
        Field("input", Custom(read_input, _INPUT_SCHEMA), "What to embed: one or several.", required=True),
        MODEL,
        Field("dimensions", Integer(1, MOST_DIMENSIONS), "Keep the first N numbers of each vector, of length 1 again."),
        Field("encoding_format", Choice(("float", "base64")), "How vectors are written; absent means float."),
    ),
    USER,
)


def read_embeddings(body: Mapping[str, Any]) -> EmbeddingsCall:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = EMBEDDINGS.read(body, "")
    inputs, single = values["input"]
    request = llm_pb2.EmbedRequest(model=values.get("model", ""), inputs=inputs, dimensions=values.get("dimensions"))
    return EmbeddingsCall(request, values.get("encoding_format") == "base64", single)


def embedding_list(response: llm_pb2.EmbedResponse, *, as_base64: bool) -> dict[str, Any]:
    """Translate the answer; vectors are numpy arrays or base64 of little-endian 32-bit floats."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(vector, as_base64=as_base64)}
            for index, vector in enumerate(response.vectors)
        ],
        "model": response.model,
        "usage": usage(response.prompt_tokens),
    }


def _written(vector: llm_pb2.Vector, *, as_base64: bool) -> Any:  # noqa: ANN401 - JSON
    return base64.b64encode(raw_floats(vector)).decode() if as_base64 else numbers(vector)


def usage(tokens: int) -> dict[str, int]:
    """Return what an answer without generated tokens has used."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
