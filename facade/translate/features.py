"""POST /api/v1/feature-extraction: one text in, one flat vector out, as the model made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from facade.translate.embeddings import MODEL, MOST_DIMENSIONS
from facade.translate.fields import Boolean, Integer, Text, refuse
from facade.translate.record import Field, record
from facade.translate.vectors import numbers
from omniserve.llm.v1 import llm_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

DEFAULT_FEATURES = 256
_TEXTS = ("text", "inputs")

FEATURES = record(
    (
        Field("text", Text(1), "What to embed. One of text and inputs is required."),
        Field("inputs", Text(1), "Another name of text."),
        MODEL,
        Field(
            "num_features",
            Integer(1, MOST_DIMENSIONS),
            f"How many numbers to return; absent means {DEFAULT_FEATURES}, or all where there are fewer.",
        ),
        Field("truncation", Boolean(), "Cut a text that is too long instead of refusing it; absent means yes."),
    )
)


def read_features(body: Mapping[str, Any]) -> llm_pb2.EmbedRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = FEATURES.read(body, "")
    given = [name for name in _TEXTS if name in values]
    if not given:
        refuse("text", "is required", code="missing_required_parameter")
    if len(given) > 1:
        refuse("inputs", "cannot be combined with 'text'")
    return llm_pb2.EmbedRequest(
        model=values.get("model", ""),
        inputs=[llm_pb2.EmbedInput(text=values[given[0]])],
        # Absent, it is cut from what comes back: a model may be narrower than the default.
        dimensions=values.get("num_features"),
        truncate=values.get("truncation", True),
        # Unscaled, fewer features are the first of more.
        raw=True,
    )


def rest_field(path: str) -> str:
    """Return the REST name of a field that the contract names by its path."""
    return {"inputs[0]": "text", "inputs": "text", "dimensions": "num_features"}.get(path, path)


def features(request: llm_pb2.EmbedRequest, response: llm_pb2.EmbedResponse) -> npt.NDArray[np.float32]:
    """Translate the answer."""
    found = numbers(response.vectors[0])
    return found if request.HasField("dimensions") else found[:DEFAULT_FEATURES]
