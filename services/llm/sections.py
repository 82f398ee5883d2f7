"""The section `models` of omniserve.yaml as it is written."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.llm.core.options import SAMPLING_RANGES
from services.llm.settings import KvType

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s\x00-\x1f]+( [^\s\x00-\x1f]+)*$")]


PICTURE_KINDS: Final = frozenset({"image", "upscaler"})
"""Kinds of models that diffusion serves; their entries are its."""


def is_others(entry: Any) -> bool:  # noqa: ANN401 - as it stands in the file
    """Return whether an entry of the section is another service's."""
    return isinstance(entry, dict) and entry.get("kind") in PICTURE_KINDS


class Section(BaseModel):
    """A part of the file: nothing unknown, frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _bounded(name: str) -> Any:  # noqa: ANN401 - stands where a field's default stands
    bounds = SAMPLING_RANGES[name]
    if bounds.above_low:
        return Field(default=None, gt=bounds.low, le=bounds.high)
    return Field(default=None, ge=bounds.low, le=bounds.high)


class SamplingSection(Section):
    """How tokens are chosen when a request does not say; what is absent is the service's default."""

    temperature: float | None = _bounded("temperature")
    top_p: float | None = _bounded("top_p")
    top_k: int | None = _bounded("top_k")
    min_p: float | None = _bounded("min_p")
    typical_p: float | None = _bounded("typical_p")
    repetition_penalty: float | None = _bounded("repetition_penalty")
    presence_penalty: float | None = _bounded("presence_penalty")
    frequency_penalty: float | None = _bounded("frequency_penalty")
    penalty_window: int | None = _bounded("penalty_window")


class ModelSection(Section):
    """One model. What is absent is as the service's settings say; paths are relative to the file's folder."""

    name: Name
    path: Path
    aliases: tuple[Name, ...] = ()
    kind: Literal["chat", "embedding", "rerank"] | None = None
    sampling: SamplingSection = SamplingSection()
    system: str | None = None
    ctx: int | None = Field(default=None, ge=16)
    request_ctx: int | None = Field(default=None, ge=0)
    contexts: int | None = Field(default=None, ge=1, le=128)
    warm_prefixes: int | None = Field(default=None, ge=0, le=255)
    ngl: Literal["auto"] | int | None = None
    kv_type: KvType | None = None
    pooling: Literal["mean", "cls", "last"] | None = None
    threads: int | None = Field(default=None, ge=0, le=512)
    ttl_s: float = Field(default=0, ge=0)
    pin: bool = False
    preload: bool = False
    loras: dict[Name, Path] = {}
    draft: Path | None = None


ModelsSection = tuple[ModelSection, ...]
