"""What an assembly of the settings works on: the knobs, the file, and the faults found so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from services.kit.config import Document, Fault, Place
from services.relay.core.addresses import AddressError, checked_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.relay.settings import RelaySettings

MODALITIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "default": "",  # the modality is that of the route
        "llm": "llm",
        "image": "image",
        "image_worker": "image",
        "birefnet": "cutout",
        "tts": "tts",
        "stt": "stt",
        "forecast": "forecast",
        "embedding": "embedding",
        "multimodal": "multimodal",
        "animation": "animation",
        "three_d": "three_d",
        "aux": "aux",
        "training": "training",
        "h3": "video",
    }
)
"""Every upstream there can be, with what its requests take permits for."""

_CLOSED_HEADERS: Final = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "te", "upgrade", "keep-alive", "trailer", "expect"}
)

T = TypeVar("T")


def variable(name: str) -> str:
    """Return the documented variable of an upstream, or of any other field: the seeds' name."""
    name = "upstream" if name == "default" else f"{name}_upstream" if name in MODALITIES else name
    return f"OMNISERVE_{name.upper().replace('THREE_D', '3D')}"


def is_closed_header(name: str) -> bool:
    """Return whether a header is the mesh's own or the connection's, so that no setting may write it."""
    return name.lower().startswith(("x-omniserve-", "x-envoy-")) or name.lower() in _CLOSED_HEADERS


@dataclass(frozen=True, slots=True)
class Reading:
    """One assembly. `environ` None: neither variables that the file names nor files are looked at."""

    settings: RelaySettings
    document: Document
    environ: Mapping[str, str] | None
    faults: list[Fault] = field(default_factory=list)

    def given(self, name: str) -> Any:  # noqa: ANN401 - of the knob's own type
        """Return a knob that was set by its variable, None for one that was not and for one that does not exist."""
        return getattr(self.settings, name) if name in self.settings.model_fields_set else None

    def at(self, name: str) -> Fault:
        """Return an empty fault of a variable."""
        return Fault("", None, variable(name), "")

    def refuse(self, where: Place | Fault, message: str) -> None:
        """Remember a fault at a place of the file, or at what an empty fault names."""
        fault = where if isinstance(where, Fault) else self.document.fault(where, "")
        self.faults.append(replace(fault, message=message))

    def path(self, path: str, where: Place | Fault) -> str:
        """Return an upstream's path; nothing after a fault."""
        try:
            if path and not path.startswith("/"):
                raise AddressError(f"path {path[:80]!r} must begin with /")  # noqa: TRY301 - one way out
            return checked_path(path)
        except AddressError as error:
            self.refuse(where, str(error))
            return ""

    def resolved(self, path: Path) -> Path:
        """Return a path of the file: relative ones start at the file's own folder."""
        return (Path(self.document.file).absolute().parent / path) if self.document.file else path


def first(*values: T | None) -> T | None:
    """Return the first value that is there."""
    return next((value for value in values if value is not None), None)
