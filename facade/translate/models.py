"""GET /v1/models: the catalogue in OpenAI's shape, with what we know beyond it under `omniserve`."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from omniserve.diffusion.v1 import diffusion_pb2
from omniserve.llm.v1 import llm_pb2


def model_object(model: llm_pb2.Model) -> dict[str, Any]:
    """Translate one catalogue entry."""
    details: dict[str, Any] = {
        "kind": _word(llm_pb2.ModelKind.Name(model.kind), "MODEL_KIND_"),
        "state": _word(llm_pb2.ModelState.Name(model.state), "MODEL_STATE_"),
        "aliases": list(model.aliases),
        "context_tokens": model.context_tokens,
        "size_mib": model.size_mib,
        "memory_mib": model.memory_mib,
        "ttl_ms": model.ttl_ms,
        "pinned": model.pinned,
        "parameters": model.parameters,
        "quantisation": model.quantisation,
        "capabilities": list(model.capabilities),
        "adapters": list(model.adapters),
    }
    if model.HasField("failure"):
        details["failure"] = model.failure
    if model.HasField("embedding_dimensions"):
        details["embedding_dimensions"] = model.embedding_dimensions
    return _entry(model, details)


def picture_model_object(model: diffusion_pb2.Model) -> dict[str, Any]:
    """Translate one catalogue entry of a model that makes or enlarges pictures."""
    capabilities = [diffusion_pb2.Capability.Name(each) for each in model.capabilities]
    details: dict[str, Any] = {
        "kind": _word(diffusion_pb2.ModelKind.Name(model.kind), "MODEL_KIND_"),
        "state": _word(diffusion_pb2.ModelState.Name(model.state), "MODEL_STATE_"),
        "aliases": list(model.aliases),
        "family": model.family,
        "size_mib": model.size_mib,
        "pinned": model.pinned,
        "max_batch": model.max_batch,
        "capabilities": [_word(name, "CAPABILITY_") for name in capabilities],
    }
    for name in _WHERE_KNOWN:
        if model.HasField(name):
            details[name] = getattr(model, name)
    return _entry(model, details)


_WHERE_KNOWN: Final = (
    "failure",
    "default_width_px",
    "default_height_px",
    "default_steps",
    "default_guidance",
    "factor",
)


def _entry(model: llm_pb2.Model | diffusion_pb2.Model, details: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's object of a model."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "omniserve",
        "omniserve": details,
    }


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


BEST: Final = "best"
"""Asks for the default model, unless the catalogue has one of this name."""


def choose_model(models: Sequence[llm_pb2.Model], asked: str, *, largest: bool) -> str:
    """Return the model to ask llm for, "" being the default. `largest`: take the largest when none is named."""
    if asked == BEST and find_model(models, BEST) is None:
        asked = ""
    candidates = [model for model in models if model.kind == llm_pb2.MODEL_KIND_CHAT]
    if asked or not largest or not candidates:
        return asked
    return max(candidates, key=lambda model: (model.parameters, model.size_mib)).name


def model_list(response: llm_pb2.ListModelsResponse, pictures: Iterable[diffusion_pb2.Model]) -> dict[str, Any]:
    """Translate the catalogues, of each the default model first."""
    models = [model_object(model) for model in response.models]
    return {"object": "list", "data": models + [picture_model_object(model) for model in pictures]}


def find_picture_model(models: Iterable[diffusion_pb2.Model], name: str) -> diffusion_pb2.Model | None:
    """Return the model of that name or alias."""
    return next((model for model in models if name in (model.name, *model.aliases)), None)


def find_model(models: Iterable[llm_pb2.Model], name: str) -> llm_pb2.Model | None:
    """Return the model of that name or alias; "" means the first that generates text, which is the default."""
    for model in models:
        if name in (model.name, *model.aliases) or (not name and model.kind == llm_pb2.MODEL_KIND_CHAT):
            return model
    return None
