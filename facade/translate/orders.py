"""POST /admin/llm/{load,unload,swap}: what the operator asks of llm's models."""

from collections.abc import Mapping
from typing import Any, Final

from facade.translate.fields import Custom, Integer, Text, wrong_type
from facade.translate.record import Field, record
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError

_MODEL: Final = Field("model", Text(1, 256), "Catalogue name or alias; absent means the default model.")
_MOST: Final = 2**31 - 1
_NGL_SCHEMA: Final = {"oneOf": [{"const": "auto"}, {"type": "integer", "minimum": -1, "maximum": 10_000}]}


def _layers(value: object, path: str) -> int | None:
    """Return the layers on the device, None for auto."""
    if value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        wrong_type(path, "auto or an integer", value)
    return Integer(-1, 10_000).read(value, path)


LOAD = record((_MODEL,))
UNLOAD = record(
    (_MODEL, Field("wait_ms", Integer(0, 3_600_000), "How long to wait for running answers; absent means as set."))
)
SWAP = record(
    (
        Field("path", Text(1, 4096), "A file below OMNISERVE_LLM_SWAP_DIR.", required=True),
        Field("ngl", Custom(_layers, _NGL_SCHEMA), 'Layers on the device; absent or "auto" is as many as fit, -1 all.'),
        Field("ctx", Integer(1, _MOST), "Tokens of its KV cache; absent means as set."),
        Field("contexts", Integer(1, _MOST), "Sequences at once; absent means as set."),
    )
)
# The contract's names of the fields that have others here.
_FIELDS: Final = {"gpu_layers": "ngl", "context_tokens": "ctx", "slots": "contexts"}


def read_load(body: Mapping[str, Any]) -> llm_pb2.LoadModelRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    return llm_pb2.LoadModelRequest(model=LOAD.read(body, "").get("model", ""))


def read_unload(body: Mapping[str, Any]) -> llm_pb2.UnloadModelRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = UNLOAD.read(body, "")
    return llm_pb2.UnloadModelRequest(model=values.get("model", ""), wait_ms=values.get("wait_ms"))


def read_swap(body: Mapping[str, Any]) -> llm_pb2.SwapModelRequest:
    """Translate a body; DomainError invalid_request names the field at fault."""
    values = SWAP.read(body, "")
    return llm_pb2.SwapModelRequest(
        path=values["path"],
        gpu_layers=values.get("ngl"),
        context_tokens=values.get("ctx"),
        slots=values.get("contexts"),
    )


def as_order(error: DomainError) -> DomainError:
    """Return the error with the caller's own field names, in the sentence too."""
    field = error.field
    if field not in _FIELDS:
        return error
    ours = _FIELDS[field]
    message = error.message.replace(f"'{field}'", f"'{ours}'")
    return DomainError(error.reason, message, field=ours, retry_after_ms=error.retry_after_ms, metadata=error.metadata)
