"""Structured output: what the caller asks the answer to be, as a grammar."""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final

from services.kit.errors import DomainError, Reason
from services.llm.core.gbnf import Rules, check_grammar
from services.llm.core.schema import object_symbol, read_schema, schema_symbol
from services.llm.core.schema_scalars import SchemaError

MOST_SCHEMA_CHARACTERS: Final = 1_000_000


class StructureKind(Enum):
    """What an answer may be asked to be; the values are the contract's names."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structure:
    """What the answer has to be. `text`: the schema as JSON, or the grammar. `strict`: refuse what cannot be enforced."""

    kind: StructureKind
    text: str = ""
    strict: bool = False

    @property
    def field(self) -> str:
        """Where it stands in the contract."""
        return f"options.structure.{self.kind.value}" + (
            ".schema_json" if self.kind is StructureKind.JSON_SCHEMA else ""
        )


@lru_cache(maxsize=64)
def grammar_of(structure: Structure) -> str:
    """Return the grammar in GBNF. Raises DomainError that names the place in the schema."""
    if structure.kind is StructureKind.GRAMMAR:
        check_grammar(structure.text, structure.field)
        return structure.text
    rules = Rules()
    return rules.text(structure_symbol(rules, structure))


def structure_symbol(rules: Rules, structure: Structure) -> str:
    """Add the rules of a structure that is no grammar of its own and return its symbol. Raises DomainError."""
    if structure.kind is StructureKind.JSON_OBJECT:
        return object_symbol(rules)
    return schema_rule(rules, structure.text, strict=structure.strict, field=structure.field)


def schema_rule(rules: Rules, text: str, *, strict: bool, field: str, only_objects: bool = False) -> str:
    """Add the rules of a schema out of its text and return its symbol. `only_objects`: a schema without a type means one.

    Raises DomainError `unsupported` for what a strict schema asks and no grammar can express, `invalid_request` for what
    is broken or too large; both name the place.
    """
    if len(text) > MOST_SCHEMA_CHARACTERS:
        message = f"'{field}' has {len(text)} characters; at most {MOST_SCHEMA_CHARACTERS} are allowed"
        raise DomainError(Reason.INVALID_REQUEST, message, field=field)
    try:
        schema = read_schema(text)
        return schema_symbol(rules, _of_object(schema) if only_objects else schema, strict=strict)
    except SchemaError as error:
        place = f"{field}.{error.path}" if error.path else field
        reason = Reason.UNSUPPORTED if error.inexpressible else Reason.INVALID_REQUEST
        raise DomainError(reason, f"'{place}' {error.why}", field=place) from None


def _of_object(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the schema of a function's arguments. Raises SchemaError when it is that of something else."""
    if not isinstance(schema, dict):
        raise SchemaError("", "must be an object")
    if schema.get("type", "object") != "object":
        raise SchemaError("type", "must be 'object': arguments have names")
    return schema if schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"} else {"type": "object"} | schema
