"""Objects with known fields: the tables that requests are made of."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from facade.translate.fields import Reader, Schema, joined, refuse, wrong_type


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request: its name, what it accepts, and the sentence that describes it."""

    name: str
    reader: Reader
    sentence: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """An object with known fields.

    `tolerated` are fields that are accepted with any value and change nothing, each with the sentence that says so.
    Any other field is refused with the nearest known name.
    """

    fields: Mapping[str, Field]
    tolerated: Mapping[str, str]

    def read(self, value: object, path: str) -> dict[str, Any]:
        """Return the fields that are there and not null, checked; null means absent."""
        if not isinstance(value, dict):
            wrong_type(path or "body", "an object", value)
        found = {}
        for name, item in value.items():
            field = self.fields.get(name)
            if field is None:
                if name not in self.tolerated:
                    self._refuse_unknown(name, path)
            elif item is not None:
                found[name] = field.reader.read(item, joined(path, name))
        for field in self.fields.values():
            if field.required and field.name not in found:
                refuse(joined(path, field.name), "is required", code="missing_required_parameter")
        return found

    def _refuse_unknown(self, name: str, path: str) -> NoReturn:
        nearest = difflib.get_close_matches(name[:60], [*self.fields, *self.tolerated], n=1, cutoff=0.0)
        hint = f"; the nearest known field is '{nearest[0]}'" if nearest else ""
        refuse(joined(path, name[:60]), f"is not a known field{hint}", code="unknown_parameter")

    def schema(self) -> Schema:
        """As Reader.schema."""
        properties = {
            field.name: field.reader.schema() | {"description": field.sentence} for field in self.fields.values()
        }
        properties |= {name: {"description": sentence} for name, sentence in self.tolerated.items()}
        required = [field.name for field in self.fields.values() if field.required]
        schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return schema | ({"required": required} if required else {})


def record(fields: Iterable[Field], tolerated: Mapping[str, str] | None = None) -> Record:
    """Make a Record of a table of fields."""
    return Record({field.name: field for field in fields}, tolerated or {})
