"""JSON schemas as GBNF: every text of the grammar is JSON that obeys the schema.

Where a schema leaves a choice the grammar takes the simplest: members come in the order in which they are declared, and
an object with declared members has no others. What no grammar can express is refused when the schema is strict, and left
out otherwise. Compiling is bounded: places, depth and the grammar's size.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from services.llm.core import pattern
from services.llm.core.gbnf import GrammarSizeError, Rules, either, literal, repeated
from services.llm.core.schema_merge import ANNOTATIONS, asserted, disjoint, merged
from services.llm.core.schema_scalars import ANY_INTEGER, ANY_NUMBER, OF_NUMBERS, Scalars, Schema, SchemaError, at

MOST_PLACES: Final = 4000
MOST_DEPTH: Final = 48
_MOST_WRITTEN: Final = 400_000

_SPACE: Final = '| " " | "\\n" [ \\t]{0,20}'
_PLAIN_TYPES: Final = MappingProxyType(
    {
        "null": '"null"',
        "boolean": '("true" | "false")',
        "integer": ANY_INTEGER,
        "number": ANY_NUMBER,
    }
)
_KEYWORDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
        "integer": OF_NUMBERS,
        "number": OF_NUMBERS,
        "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"}),
        "object": frozenset(
            {"properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties",
             "propertyNames", "dependentRequired", "dependentSchemas"}
        ),
        "boolean": frozenset(),
        "null": frozenset(),
    }
)  # fmt: skip
_TYPES: Final = tuple(_KEYWORDS)
_KNOWN: Final = frozenset().union(
    *_KEYWORDS.values(), ANNOTATIONS, {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
)
# Keywords that no grammar holds, with the values that demand nothing.
_INEXPRESSIBLE: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "uniqueItems": (False,),
        "contains": (True,),
        "patternProperties": ({},),
        "propertyNames": (True, {}, {"type": "string"}),
        "dependentRequired": ({},),
        "dependentSchemas": ({},),
    }
)


def read_schema(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema out of its text. Raises SchemaError."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise SchemaError("", f"is no JSON: {error}"[:200]) from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def schema_symbol(rules: Rules, schema: object, *, strict: bool) -> str:
    """Add a schema's rules and return its symbol. Raises SchemaError."""
    compiler = _Compiler(rules, schema, strict=strict)
    try:
        return compiler.symbol(schema, "", 0)
    except GrammarSizeError as error:
        raise SchemaError("", f"is too large: {error}") from None
    except pattern.PatternError as error:  # only from bounds that hold for every string
        raise SchemaError("", str(error)) from None


def object_symbol(rules: Rules) -> str:
    """Add the rules of any JSON object and return its symbol."""
    return schema_symbol(rules, {"type": "object"}, strict=False)


class _Compiler:
    def __init__(self, rules: Rules, document: object, *, strict: bool) -> None:
        self._rules = rules
        self._document = document
        self._strict = strict
        self._scalars = Scalars(rules, self._cannot)
        self._space = rules.add(_SPACE)
        self._close_object = rules.add(f'{self._space} "}}"')
        self._places = 0
        self._written = 0
        self._named: dict[str, str] = {}
        self._open: tuple[str, ...] = ()  # references that are followed and have produced no character yet
        self._value: str | None = None

    # ---- places -----------------------------------------------------------------------------------------------

    def symbol(self, schema: object, path: str, depth: int) -> str:
        """Return the symbol of whatever stands at a place."""
        self._places += 1
        if self._places > MOST_PLACES:
            raise SchemaError(path, f"is one place too many: a schema may have {MOST_PLACES}")
        if depth > MOST_DEPTH:
            raise SchemaError(path, f"is nested deeper than {MOST_DEPTH}")
        if schema is True or schema == {}:
            return self._any_value()
        if schema is False:
            raise SchemaError(path, "allows no value at all")
        if not isinstance(schema, dict):
            raise SchemaError(path, "must be an object or a boolean")
        self._check_known(schema, path)
        return self._rules.add(self._body(asserted(schema), path, depth))

    def _check_known(self, schema: Schema, path: str) -> None:
        for keyword in schema:
            if keyword not in _KNOWN and not keyword.startswith("x-"):
                self._cannot(at(path, keyword[:60]), "is not a keyword that can be enforced")

    def _cannot(self, path: str, why: str) -> None:
        if self._strict:
            raise SchemaError(path, why, inexpressible=True)

    def _body(self, schema: Schema, path: str, depth: int) -> str:
        if "$ref" in schema:
            return self._reference(schema, path, depth)
        if "allOf" in schema:
            return self.symbol(self._all_of(schema, path, depth), path, depth + 1)
        if "enum" in schema or "const" in schema:
            return self._constants(schema, path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._any_of(schema, keyword, path, depth)
        types = self._types(schema, path)
        return either(self._typed(name, schema, path, depth) for name in types)

    def _types(self, schema: Schema, path: str) -> tuple[str, ...]:
        declared = schema.get("type")
        if declared is None:
            found = tuple(name for name in _TYPES if _KEYWORDS[name] & schema.keys() and name != "integer")
            return found or ("object", "array", "string", "number", "boolean", "null")
        names = tuple(declared) if isinstance(declared, list) else (declared,)
        for name in names:
            if name not in _TYPES:
                raise SchemaError(at(path, "type"), f"is {str(name)[:40]!r}; {', '.join(_TYPES)} are known")
        if not names:
            raise SchemaError(at(path, "type"), "allows no value at all")
        return names

    def _typed(self, name: str, schema: Schema, path: str, depth: int) -> str:
        for keyword in _KEYWORDS[name] & schema.keys():
            if keyword in _INEXPRESSIBLE and schema[keyword] not in _INEXPRESSIBLE[keyword]:
                self._cannot(at(path, keyword), "cannot be expressed by a grammar")
        kinds: dict[str, Callable[[], str]] = {
            "object": lambda: self._object(schema, path, depth),
            "array": lambda: self._array(schema, path, depth),
            "string": lambda: self._scalars.string(schema, path),
            "integer": lambda: self._scalars.integer(schema, path),
            "number": lambda: self._scalars.number(schema, path),
        }
        return kinds[name]() if name in kinds else _PLAIN_TYPES[name]

    # ---- references and combinations --------------------------------------------------------------------------

    def _reference(self, schema: Schema, path: str, depth: int) -> str:
        pointer = schema["$ref"]
        if len(schema) > 1:
            target = self._resolve(pointer, path)
            return self.symbol(self._merged([{**schema, "$ref": None}, target], path), path, depth + 1)
        target = self._resolve(pointer, path)
        if pointer in self._open:
            raise SchemaError(at(path, "$ref"), f"{str(pointer)[:80]!r} leads back to itself")
        if pointer in self._named:
            return self._named[pointer]
        name = self._named[pointer] = self._rules.reserve()
        former, self._open = self._open, (*self._open, pointer)
        self._rules.define(name, self.symbol(target, str(pointer).lstrip("#/").replace("/", "."), depth + 1))
        self._open = former
        return name

    def _resolve(self, pointer: object, path: str) -> object:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaError(
                at(path, "$ref"), "must begin with '#/': only places in the schema itself can be referred to"
            )
        found = self._document
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise SchemaError(at(path, "$ref"), f"{pointer[:80]!r} leads nowhere")
        return found

    def _merged(self, schemas: list[object], path: str) -> object:
        """Return one schema that demands what all do; what cannot be combined is left out, or refused."""
        found: Schema = {}
        for place, each in enumerate(schemas):
            if not isinstance(each, (dict, bool)):
                raise SchemaError(f"{path}[{place}]", "must be an object or a boolean")
            if each is False:
                return False
            rest = (
                {}
                if each is True
                else {name: value for name, value in each.items() if value is not None or name == "const"}
            )
            followed = 0
            while "$ref" in rest:
                followed += 1
                if followed > MOST_DEPTH:
                    raise SchemaError(at(path, "$ref"), "leads back to itself")
                target = self._resolve(rest.pop("$ref"), path)
                rest = self._combine(rest, target if isinstance(target, dict) else {}, path)
            found = self._combine(found, rest, path)
        return found

    def _combine(self, first: Schema, second: Schema, path: str) -> Schema:
        combined, clash = merged(first, second)
        if clash is not None:
            self._cannot(at(path, clash.keyword), clash.why)
        return combined

    def _all_of(self, schema: Schema, path: str, depth: int) -> object:
        parts = schema["allOf"]
        if not isinstance(parts, list) or not parts:
            raise SchemaError(at(path, "allOf"), "must be an array of schemas")
        self._places += len(parts)
        if depth > MOST_DEPTH:
            raise SchemaError(path, f"is nested deeper than {MOST_DEPTH}")
        rest = {name: value for name, value in schema.items() if name != "allOf"}
        return self._merged([rest, *parts], at(path, "allOf"))

    def _any_of(self, schema: Schema, keyword: str, path: str, depth: int) -> str:
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise SchemaError(at(path, keyword), "must be an array of schemas")
        rest = {name: value for name, value in schema.items() if name != keyword}
        if keyword == "oneOf" and not disjoint([self._followed(each, path) for each in options]):
            self._cannot(at(path, keyword), "cannot be expressed unless its schemas exclude each other; use 'anyOf'")
        found = []
        for place, option in enumerate(options):
            whole = self._merged([rest, option], at(path, keyword)) if rest else option
            if whole is not False:
                found.append(self.symbol(whole, f"{at(path, keyword)}[{place}]", depth + 1))
        if not found:
            raise SchemaError(at(path, keyword), "allows no value at all")
        return either(dict.fromkeys(found))

    def _followed(self, schema: object, path: str) -> object:
        for _ in range(MOST_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._resolve(schema["$ref"], path)
        return schema

    def _constants(self, schema: Schema, path: str) -> str:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            raise SchemaError(at(path, "enum"), "must be an array of at least one value")
        if "enum" in schema and "const" in schema:
            values = [value for value in values if _same(value, schema["const"])]
        if "type" in schema:
            types = self._types(schema, path)
            values = [value for value in values if any(_is_of(value, name) for name in types)]
        for keyword in schema.keys() - {"enum", "const", "type"}:
            self._cannot(at(path, keyword), "cannot be combined with 'enum' or 'const'")
        if not values:
            raise SchemaError(at(path, "enum"), "allows no value of its type")
        return either(dict.fromkeys(self._constant(value, path) for value in values))

    def _constant(self, value: object, path: str) -> str:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise SchemaError(path, "has a number that JSON does not have") from None
        self._written += len(text)
        if self._written > _MOST_WRITTEN:
            raise SchemaError(path, f"has fixed values of more than {_MOST_WRITTEN} characters")
        try:
            text.encode()
        except UnicodeEncodeError:
            text = json.dumps(value)
        return literal(text)

    # ---- values -----------------------------------------------------------------------------------------------

    def _any_value(self) -> str:
        if self._value is None:
            self._value = self._rules.reserve()
            kinds = ("object", "array", "string", "number", "boolean", "null")
            self._rules.define(self._value, " | ".join(self._typed(name, {}, "", 0) for name in kinds))
        return self._value

    def _inside(self, schema: object, path: str, depth: int) -> str:
        """Return the symbol of a value inside an object or array: references may lead back from here."""
        former, self._open = self._open, ()
        try:
            return self.symbol(schema, path, depth + 1)
        finally:
            self._open = former

    def _object(self, schema: Schema, path: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaError(at(path, "properties"), "must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(at(path, "required"), "must be an array of names")
        additional = schema.get("additionalProperties", True)
        members = dict(properties)
        for name in required:
            if name not in members and additional is False:
                raise SchemaError(at(path, "required"), f"names {name[:60]!r}, which the object cannot have")
            members.setdefault(name, additional)
        least, most = self._scalars.bounds(schema, "Properties", path)
        if not members and "properties" in schema and "additionalProperties" not in schema and least == 0:
            additional = False  # as with declared members: there are no others
        if not members:
            return self._map(additional, least, most, path, depth)
        if least > len(set(required)) or (most is not None and most < len(members)):
            self._cannot(path, "counts the members of an object with declared members, which a grammar cannot express")
        return self._members(members, frozenset(required), path, depth)

    def _members(self, members: Schema, required: frozenset[str], path: str, depth: int) -> str:
        """Return an object whose members come in order: at each, whether one came before decides about the comma."""
        first = after = self._close_object
        for name, schema in reversed(members.items()):
            value = self._inside(schema, at(path, f"properties.{name[:60]}"), depth)
            pair = self._rules.add(f"{self._constant(name, path)} {self._colon()} {value}")
            comes = f'"," {self._space} {pair} {after}'
            begins = f"{pair} {after}"
            after = self._rules.add(comes if name in required else f"{comes} | {after}")
            first = self._rules.add(begins if name in required else f"{begins} | {first}")
        return f'"{{" {self._space} {first}'

    def _map(self, additional: object, least: int, most: int | None, path: str, depth: int) -> str:
        if additional is False:
            if least > 0:
                raise SchemaError(at(path, "minProperties"), f"is {least}, but the object can have no members")
            return f'"{{" {self._close_object}'
        value = self._inside(additional, at(path, "additionalProperties"), depth)
        pair = self._rules.add(f"{self._scalars.any_text()} {self._colon()} {value}")
        return f'"{{" {self._space} {self._list(pair, least, most)} "}}"'

    def _colon(self) -> str:
        return self._rules.add(f'":" {self._space}')

    def _list(self, item: str, least: int, most: int | None) -> str:
        """Return items with commas between them and space at the end."""
        if most == 0:
            return self._space
        more = self._rules.add(f'"," {self._space} {item}')
        several = f"{item} {repeated(more, max(least - 1, 0), None if most is None else most - 1)} {self._space}"
        return several if least > 0 else f"({several} | {self._space})"

    def _array(self, schema: Schema, path: str, depth: int) -> str:
        least, most = self._scalars.bounds(schema, "Items", path)
        fixed, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):
            raise SchemaError(at(path, "items"), "must be a schema; use 'prefixItems' for several")
        if not isinstance(fixed, list):
            raise SchemaError(at(path, "prefixItems"), "must be an array of schemas")
        if not fixed:
            if items is False:
                most = 0
            item = "" if most == 0 else self._inside(items, at(path, "items"), depth)
            return f'"[" {self._space} {self._list(item, least, most)} "]"'
        fixed = fixed if most is None else fixed[:most]
        parts = [self._inside(each, f"{at(path, 'prefixItems')}[{place}]", depth) for place, each in enumerate(fixed)]
        body = f' "," {self._space} '.join(parts)
        if least > len(fixed) or ("items" in schema and items is not False):
            item = self._inside(items, at(path, "items"), depth)
            more = self._rules.add(f'"," {self._space} {item}')
            body += f" {repeated(more, max(least - len(fixed), 0), None if most is None else most - len(fixed))}"
        return f'"[" {self._space} {body} {self._space} "]"'


def _same(first: object, second: object) -> bool:
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _is_of(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    kinds: dict[str, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "null": type(None),
        "boolean": bool,
    }
    return isinstance(value, kinds[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())
