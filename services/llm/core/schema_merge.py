"""Combining JSON schemas into one that demands what all of them do, and telling schemas apart."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

Schema = dict[str, Any]

ANNOTATIONS: Final = frozenset(
    {
        "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
        "$comment", "$defs", "definitions", "$anchor", "discriminator", "nullable", "contentEncoding", "contentMediaType",
    }
)  # fmt: skip
"""Keywords that demand nothing of a value."""


@dataclass(frozen=True, slots=True)
class Clash:
    """Two demands that cannot be made one."""

    keyword: str
    why: str


def asserted(schema: Schema) -> Schema:
    """Return what a schema demands: without what only describes."""
    return {name: value for name, value in schema.items() if name not in ANNOTATIONS and not name.startswith("x-")}


def merged(first: Schema, second: Schema) -> tuple[Schema, Clash | None]:
    """Return a schema that demands what both do, and what had to be left out of it, if anything."""
    found = dict(asserted(first))
    clash: Clash | None = _closed(first, second)
    for keyword, value in asserted(second).items():
        if keyword not in found or found[keyword] == value:
            found[keyword] = value
        elif keyword in _BOTH:
            found[keyword] = _BOTH[keyword](found[keyword], value)
        else:
            clash = Clash(keyword, "is demanded twice, and the two cannot be combined")
    return found, clash


def _closed(first: Schema, second: Schema) -> Clash | None:
    """Find a schema that allows no further members beside one that has some: what both demand is not their sum."""
    for one, other in ((first, second), (second, first)):
        if one.get("additionalProperties") is False:
            extra = _members(other).keys() - _members(one).keys()
            if extra:
                return Clash("additionalProperties", f"forbids {min(extra)[:60]!r}, which another schema declares")
    return None


def _properties(first: Any, second: Any) -> Any:  # noqa: ANN401 - any JSON value
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first
    both = {
        name: {"allOf": [first[name], second[name]]} for name in first if name in second and first[name] != second[name]
    }
    return {**first, **second, **both}


def _types(first: Any, second: Any) -> Any:  # noqa: ANN401 - any JSON value
    left = first if isinstance(first, list) else [first]
    right = second if isinstance(second, list) else [second]
    common = [name for name in left if name in right or (name == "integer" and "number" in right)]
    return common + [name for name in right if name == "integer" and "number" in left and name not in left]


def _schemas(first: Any, second: Any) -> Any:  # noqa: ANN401 - any JSON value
    if first is False or second is False:
        return False
    return (
        {"allOf": [each for each in (first, second) if each is not True]}
        if True not in (first, second)
        else (second if first is True else first)
    )


def _larger(first: Any, second: Any) -> Any:  # noqa: ANN401 - any JSON value
    return max(first, second) if _numbers(first, second) else first


def _smaller(first: Any, second: Any) -> Any:  # noqa: ANN401 - any JSON value
    return min(first, second) if _numbers(first, second) else first


def _numbers(*values: object) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _lists(first: Any, second: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
    return [*first, *second] if isinstance(first, list) and isinstance(second, list) else []


def _shared(first: Any, second: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
    return [value for value in first if value in second] if isinstance(first, list) and isinstance(second, list) else []


_BOTH: Final[Mapping[str, Callable[[Any, Any], Any]]] = MappingProxyType(
    {
        "properties": _properties,
        "required": _lists,
        "allOf": _lists,
        "type": _types,
        "enum": _shared,
        "items": _schemas,
        "additionalProperties": _schemas,
        **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), _larger),
        **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), _smaller),
    }
)


def disjoint(schemas: Sequence[object]) -> bool:
    """Return whether no value can obey two of the schemas, as far as types and fixed members tell."""
    return all(_apart(first, second) for first, second in itertools.combinations(schemas, 2))


def _apart(first: object, second: object) -> bool:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first is False or second is False
    left, right = _fixed(first), _fixed(second)
    if left is not None and right is not None:
        return not any(value in right for value in left)
    if "type" in first and "type" in second and not _types(first["type"], second["type"]):
        return True
    mine, theirs = _members(first), _members(second)
    names = _required(first) & _required(second)
    return any(
        name in mine and name in theirs and _fixed(mine[name]) is not None and _apart(mine[name], theirs[name])
        for name in names
    )


def _members(schema: Schema) -> Schema:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: Schema) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _fixed(schema: object) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) else None
