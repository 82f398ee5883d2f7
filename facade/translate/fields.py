"""Readers turn untrusted JSON values into checked Python values, or refuse them naming the field.

A reader also knows the JSON schema of what it accepts, so the published API description is made of the very tables
that parse requests and cannot drift from them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from services.kit.errors import DomainError, Reason

Schema = dict[str, Any]


class Reader(Protocol):
    """Checks one JSON value."""

    def read(self, value: object, path: str) -> Any:  # noqa: ANN401  (each reader returns its own type)
        """Return the checked value; DomainError invalid_request names `path`."""

    def schema(self) -> Schema:
        """Return the JSON schema of what `read` accepts."""


def refuse(
    path: str, message: str, *, code: str = "invalid_value", reason: Reason = Reason.INVALID_REQUEST
) -> NoReturn:
    """Refuse the field at `path` ("messages[0].role"); the sentence continues after the field's name."""
    raise DomainError(reason, f"'{path}' {message}", field=path, metadata={"code": code})


_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "a string",
    list: "an array",
}


def kind_of(value: object) -> str:
    """Name a JSON value's type the way a caller would."""
    return _KINDS.get(type(value), "an object")


def wrong_type(path: str, wanted: str, value: object) -> NoReturn:
    """Refuse a value of another JSON type."""
    refuse(path, f"must be {wanted}, not {kind_of(value)}", code="invalid_type")


def shown(value: object) -> str:
    """Quote a caller's value in a message, shortened: it may be megabytes long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false; numbers do not count."""

    def read(self, value: object, path: str) -> bool:
        """As Reader.read."""
        if not isinstance(value, bool):
            wrong_type(path, "true or false", value)
        return value

    def schema(self) -> Schema:
        """As Reader.schema."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number between two bounds, both included; neither booleans nor 2.0 count."""

    low: int
    high: int

    def read(self, value: object, path: str) -> int:
        """As Reader.read."""
        if not isinstance(value, int) or isinstance(value, bool):
            wrong_type(path, f"an integer from {self.low} to {self.high}", value)
        if value < self.low:
            refuse(path, f"must be at least {self.low}, not {shown(value)}", code="integer_below_min_value")
        if value > self.high:
            refuse(path, f"must be at most {self.high}, not {shown(value)}", code="integer_above_max_value")
        return value

    def schema(self) -> Schema:
        """As Reader.schema."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number between two bounds, both included unless `above` excludes the lower one."""

    low: float
    high: float
    above: bool = False

    def read(self, value: object, path: str) -> float:
        """As Reader.read."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            wrong_type(path, f"a number {self._range()}", value)
        if isinstance(value, float) and not math.isfinite(value):
            refuse(path, f"must be a finite number, not {value}")
        if value < self.low or (self.above and value <= self.low):
            bound = "above" if self.above else "at least"
            refuse(path, f"must be {bound} {self.low:g}, not {shown(value)}", code="decimal_below_min_value")
        if value > self.high:
            refuse(path, f"must be at most {self.high:g}, not {shown(value)}", code="decimal_above_max_value")
        return float(value)

    def _range(self) -> str:
        return f"{'above' if self.above else 'from'} {self.low:g} to {self.high:g}"

    def schema(self) -> Schema:
        """As Reader.schema."""
        return {"type": "number", "exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Text:
    """A string with a bounded length in characters, and a form where one is asked for."""

    shortest: int = 0
    longest: int | None = None
    form: str | None = None

    def read(self, value: object, path: str) -> str:
        """As Reader.read."""
        if not isinstance(value, str):
            wrong_type(path, "a string", value)
        if len(value) < self.shortest:
            refuse(path, "must not be empty", code="string_below_min_length")
        if self.longest is not None and len(value) > self.longest:
            refuse(
                path, f"must have at most {self.longest} characters, not {len(value)}", code="string_above_max_length"
            )
        if self.form is not None and not re.fullmatch(self.form, value):
            refuse(path, f"must match {self.form}, not {shown(value)}")
        return value

    def schema(self) -> Schema:
        """As Reader.schema."""
        schema: Schema = {"type": "string"}
        if self.shortest:
            schema["minLength"] = self.shortest
        if self.longest is not None:
            schema["maxLength"] = self.longest
        if self.form is not None:
            schema["pattern"] = f"^{self.form}$"
        return schema


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, value: object, path: str) -> str:
        """As Reader.read."""
        if not isinstance(value, str):
            wrong_type(path, f"one of {', '.join(self.words)}", value)
        if value not in self.words:
            refuse(path, f"must be one of {', '.join(self.words)}, not {shown(value)}")
        return value

    def schema(self) -> Schema:
        """As Reader.schema."""
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class ListOf:
    """An array of one kind of item with a bounded length."""

    item: Reader
    fewest: int = 0
    most: int | None = None

    def read(self, value: object, path: str) -> list[Any]:
        """As Reader.read."""
        if not isinstance(value, list):
            wrong_type(path, "an array", value)
        check_length(value, path, self.fewest, self.most)
        read = self.item.read
        return [read(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def schema(self) -> Schema:
        """As Reader.schema."""
        schema: Schema = {"type": "array", "items": self.item.schema()}
        if self.fewest:
            schema["minItems"] = self.fewest
        if self.most is not None:
            schema["maxItems"] = self.most
        return schema


def check_length(items: Sequence[object], path: str, fewest: int, most: int | None) -> None:
    """Refuse an array that is too short or too long, with both numbers."""
    if len(items) < fewest:
        refuse(path, f"must have at least {fewest} item{'s' if fewest > 1 else ''}", code="array_below_min_length")
    if most is not None and len(items) > most:
        refuse(path, f"must have at most {most} items, not {len(items)}", code="array_above_max_length")


@dataclass(frozen=True, slots=True)
class AnyObject:
    """An object whose content is somebody else's business, such as a JSON schema."""

    depth: int = 64

    def read(self, value: object, path: str) -> dict[str, Any]:
        """As Reader.read."""
        if not isinstance(value, dict):
            wrong_type(path, "an object", value)
        if is_deeper_than(value, self.depth):
            refuse(path, f"must not be nested deeper than {self.depth} levels")
        return value

    def schema(self) -> Schema:
        """As Reader.schema."""
        return {"type": "object", "additionalProperties": True}


def is_deeper_than(value: object, depth: int) -> bool:
    """Whether arrays and objects nest deeper than `depth` levels; a flat value has depth 0."""
    level: list[object] = [value]
    for _ in range(depth + 1):
        level = [child for item in level for child in children_of(item)]
        if not level:
            return False
    return True


def children_of(value: object) -> Iterable[object]:
    """Return what an array or object holds; nothing for other values."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class Custom:
    """A reader for one field with a form of its own."""

    parse: Callable[[object, str], Any]
    description: Schema

    def read(self, value: object, path: str) -> Any:  # noqa: ANN401  (as the Protocol)
        """As Reader.read."""
        return self.parse(value, path)

    def schema(self) -> Schema:
        """As Reader.schema."""
        return self.description


def joined(path: str, name: str) -> str:
    """Path of a member of the object at `path`."""
    return f"{path}.{name}" if path else name
