"""What a former process had in force, kept so that a bad setting at the next start does not close the routes."""

import json
import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from services.kit import telemetry
from services.relay.core.model import RelayInputs

_INPUTS: Final = TypeAdapter(RelayInputs)
_log = telemetry.logger(__name__)


class FormerInputs:
    """A file with the settings' values in force. Only its owner reads it: it may hold keys."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> RelayInputs | None:
        """Return what was in force last; None when nothing was, or the file cannot be used."""
        try:
            return _INPUTS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            _log.warning("what was in force before cannot be read", path=str(self._path), error=type(error).__name__)
            return None

    def write(self, inputs: RelayInputs) -> None:
        """Replace the file in one move. Raises OSError."""
        text = json.dumps(_plain(inputs))
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(self._path)


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of the model
    """Return a value as JSON has it."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value
