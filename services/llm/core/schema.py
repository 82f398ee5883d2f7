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
from services.llm.core.gbnf import MOST_REPEATS, GrammarSizeError, Rules, digits_between, either, literal, repeated
from services.llm.core.schema_merge import ANNOTATIONS, asserted, disjoint, merged

MOST_PLACES: Final = 4000
MOST_DEPTH: Final = 48
_MOST_DIGITS: Final = 16
_MOST_WRITTEN: Final = 400_000

Schema = dict[str, Any]

_SPACE: Final = '| " " | "\\n" [ \\t]{0,20}'
_INTEGRAL: Final = f'("0" | [1-9] [0-9]{{0,{_MOST_DIGITS - 1}}})'
_FRACTION: Final = f'("." [0-9]{{1,{_MOST_DIGITS}}})? ([eE] [-+]? [0-9]{{1,2}})?'
_PLAIN_TYPES: Final = MappingProxyType(
    {
        "null": '"null"',
        "boolean": '("true" | "false")',
        "integer": f'"-"? {_INTEGRAL}',
        "number": f'"-"? {_INTEGRAL} {_FRACTION}',
    }
)
_KEYWORDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
        "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
        "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
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


class SchemaError(Exception):
    """A schema that is broken or cannot be enforced. `path`: the place inside it, "" for its top."""

    def __init__(self, path: str, why: str, *, inexpressible: bool = False) -> None:
        super().__init__(why)
        self.path = path
        self.why = why
        self.inexpressible = inexpressible


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
                self._cannot(_at(path, keyword[:60]), "is not a keyword that can be enforced")

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
                raise SchemaError(_at(path, "type"), f"is {str(name)[:40]!r}; {', '.join(_TYPES)} are known")
        if not names:
            raise SchemaError(_at(path, "type"), "allows no value at all")
        return names

    def _typed(self, name: str, schema: Schema, path: str, depth: int) -> str:
        for keyword in _KEYWORDS[name] & schema.keys():
            if keyword in _INEXPRESSIBLE and schema[keyword] not in _INEXPRESSIBLE[keyword]:
                self._cannot(_at(path, keyword), "cannot be expressed by a grammar")
        kinds: dict[str, Callable[[], str]] = {
            "object": lambda: self._object(schema, path, depth),
            "array": lambda: self._array(schema, path, depth),
            "string": lambda: self._string(schema, path),
            "integer": lambda: self._integer(schema, path),
            "number": lambda: self._number(schema, path),
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
            raise SchemaError(_at(path, "$ref"), f"{str(pointer)[:80]!r} leads back to itself")
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
                _at(path, "$ref"), "must begin with '#/': only places in the schema itself can be referred to"
            )
        found = self._document
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise SchemaError(_at(path, "$ref"), f"{pointer[:80]!r} leads nowhere")
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
                    raise SchemaError(_at(path, "$ref"), "leads back to itself")
                target = self._resolve(rest.pop("$ref"), path)
                rest = self._combine(rest, target if isinstance(target, dict) else {}, path)
            found = self._combine(found, rest, path)
        return found

    def _combine(self, first: Schema, second: Schema, path: str) -> Schema:
        combined, clash = merged(first, second)
        if clash is not None:
            self._cannot(_at(path, clash.keyword), clash.why)
        return combined

    def _all_of(self, schema: Schema, path: str, depth: int) -> object:
        parts = schema["allOf"]
        if not isinstance(parts, list) or not parts:
            raise SchemaError(_at(path, "allOf"), "must be an array of schemas")
        self._places += len(parts)
        if depth > MOST_DEPTH:
            raise SchemaError(path, f"is nested deeper than {MOST_DEPTH}")
        rest = {name: value for name, value in schema.items() if name != "allOf"}
        return self._merged([rest, *parts], _at(path, "allOf"))

    def _any_of(self, schema: Schema, keyword: str, path: str, depth: int) -> str:
        options = schema[keyword]
        if not isinstance(options, list) or not options:
            raise SchemaError(_at(path, keyword), "must be an array of schemas")
        rest = {name: value for name, value in schema.items() if name != keyword}
        if keyword == "oneOf" and not disjoint([self._followed(each, path) for each in options]):
            self._cannot(_at(path, keyword), "cannot be expressed unless its schemas exclude each other; use 'anyOf'")
        found = []
        for place, option in enumerate(options):
            whole = self._merged([rest, option], _at(path, keyword)) if rest else option
            if whole is not False:
                found.append(self.symbol(whole, f"{_at(path, keyword)}[{place}]", depth + 1))
        if not found:
            raise SchemaError(_at(path, keyword), "allows no value at all")
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
            raise SchemaError(_at(path, "enum"), "must be an array of at least one value")
        if "enum" in schema and "const" in schema:
            values = [value for value in values if _same(value, schema["const"])]
        if "type" in schema:
            types = self._types(schema, path)
            values = [value for value in values if any(_is_of(value, name) for name in types)]
        for keyword in schema.keys() - {"enum", "const", "type"}:
            self._cannot(_at(path, keyword), "cannot be combined with 'enum' or 'const'")
        if not values:
            raise SchemaError(_at(path, "enum"), "allows no value of its type")
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
            raise SchemaError(_at(path, "properties"), "must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(_at(path, "required"), "must be an array of names")
        additional = schema.get("additionalProperties", True)
        members = dict(properties)
        for name in required:
            if name not in members and additional is False:
                raise SchemaError(_at(path, "required"), f"names {name[:60]!r}, which the object cannot have")
            members.setdefault(name, additional)
        least, most = self._bounds(schema, "Properties", path)
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
            value = self._inside(schema, _at(path, f"properties.{name[:60]}"), depth)
            pair = self._rules.add(f"{self._constant(name, path)} {self._colon()} {value}")
            comes = f'"," {self._space} {pair} {after}'
            begins = f"{pair} {after}"
            after = self._rules.add(comes if name in required else f"{comes} | {after}")
            first = self._rules.add(begins if name in required else f"{begins} | {first}")
        return f'"{{" {self._space} {first}'

    def _map(self, additional: object, least: int, most: int | None, path: str, depth: int) -> str:
        if additional is False:
            if least > 0:
                raise SchemaError(_at(path, "minProperties"), f"is {least}, but the object can have no members")
            return f'"{{" {self._close_object}'
        value = self._inside(additional, _at(path, "additionalProperties"), depth)
        pair = self._rules.add(f"{self._text()} {self._colon()} {value}")
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
        least, most = self._bounds(schema, "Items", path)
        fixed, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):
            raise SchemaError(_at(path, "items"), "must be a schema; use 'prefixItems' for several")
        if not isinstance(fixed, list):
            raise SchemaError(_at(path, "prefixItems"), "must be an array of schemas")
        if not fixed:
            if items is False:
                most = 0
            item = "" if most == 0 else self._inside(items, _at(path, "items"), depth)
            return f'"[" {self._space} {self._list(item, least, most)} "]"'
        fixed = fixed if most is None else fixed[:most]
        parts = [self._inside(each, f"{_at(path, 'prefixItems')}[{place}]", depth) for place, each in enumerate(fixed)]
        body = f' "," {self._space} '.join(parts)
        if least > len(fixed) or ("items" in schema and items is not False):
            item = self._inside(items, _at(path, "items"), depth)
            more = self._rules.add(f'"," {self._space} {item}')
            body += f" {repeated(more, max(least - len(fixed), 0), None if most is None else most - len(fixed))}"
        return f'"[" {self._space} {body} {self._space} "]"'

    def _bounds(self, schema: Schema, suffix: str, path: str) -> tuple[int, int | None]:
        """Return how many there are at least and at most. Raises SchemaError."""
        least, most = schema.get(f"min{suffix}", 0), schema.get(f"max{suffix}")
        for keyword in (f"min{suffix}", f"max{suffix}"):
            value = schema.get(keyword, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise SchemaError(_at(path, keyword), "must be a whole number, 0 or more")
        if most is not None and most < least:
            raise SchemaError(_at(path, f"max{suffix}"), f"is {most}, below 'min{suffix}', {least}")
        if least > MOST_REPEATS:
            raise SchemaError(
                _at(path, f"min{suffix}"), f"is {least}; at most {MOST_REPEATS} can be enforced", inexpressible=True
            )
        if most is not None and most > MOST_REPEATS:
            self._cannot(_at(path, f"max{suffix}"), f"is {most}; at most {MOST_REPEATS} can be enforced")
            most = None
        return least, most

    def _text(self) -> str:
        return self._rules.add(f'"\\"" {repeated(pattern.any_character(self._rules), 0, None)} "\\""')

    def _string(self, schema: Schema, path: str) -> str:
        expression, form = schema.get("pattern"), schema.get("format")
        least, most = self._bounds(schema, "Length", path)
        if form is not None and not (isinstance(form, str) and form in pattern.FORMATS):
            self._cannot(_at(path, "format"), f"is {str(form)[:40]!r}; {', '.join(pattern.FORMATS)} can be enforced")
            form = None
        if expression is not None and form is not None:
            self._cannot(_at(path, "format"), "cannot be combined with 'pattern'")
        keyword = "pattern" if expression is not None else "format"
        wanted = expression if expression is not None else pattern.FORMATS.get(form) if form is not None else None
        if wanted is not None:
            if least > 0 or most is not None:
                self._cannot(_at(path, keyword), "cannot be combined with 'minLength' or 'maxLength'")
            if not isinstance(wanted, str):
                raise SchemaError(_at(path, keyword), "must be a string")
            try:
                return f'"\\"" {pattern.inside_quotes(self._rules, wanted)} "\\""'
            except pattern.PatternError as error:
                self._cannot(_at(path, keyword), str(error))
        return f'"\\"" {repeated(pattern.any_character(self._rules), least, most)} "\\""'

    def _integer(self, schema: Schema, path: str) -> str:
        if schema.get("multipleOf", 1) not in (1, 1.0):
            self._cannot(_at(path, "multipleOf"), "cannot be expressed by a grammar")
        low, high = self._limits(schema, path)
        if low is None and high is None:
            return _PLAIN_TYPES["integer"]
        if low is not None and high is not None and low > high:
            raise SchemaError(path, f"allows no whole number: none lies between {low} and {high}")
        found = []
        if high is None or high >= 0:
            found += digits_between(max(low or 0, 0), high, _MOST_DIGITS)
        if low is None or low < 0:
            least = 1 if high is None or high >= -1 else -high
            most = None if low is None else -low
            found += [f'"-" {digits}' for digits in digits_between(least, most, _MOST_DIGITS)]
        return either(found)

    def _limits(self, schema: Schema, path: str) -> tuple[int | None, int | None]:
        """Return the smallest and the largest whole number that is allowed."""
        lows, highs = [], []
        for keyword, value in schema.items():
            if keyword not in {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 10**_MOST_DIGITS:
                raise SchemaError(_at(path, keyword), f"must be a number of less than {_MOST_DIGITS + 1} digits")
            whole = int(value // 1)
            if keyword == "minimum":
                lows.append(whole if whole == value else whole + 1)
            elif keyword == "exclusiveMinimum":
                lows.append(whole + 1)
            elif keyword == "maximum":
                highs.append(whole)
            else:
                highs.append(whole - 1 if whole == value else whole)
        return max(lows, default=None), min(highs, default=None)

    def _number(self, schema: Schema, path: str) -> str:
        bounds = {name: schema[name] for name in _KEYWORDS["number"] if name in schema}
        if bounds == {"minimum": 0}:
            return f"{_INTEGRAL} {_FRACTION}"
        for keyword in bounds:
            self._cannot(
                _at(path, keyword), "cannot be expressed for numbers with fractions, but 'minimum': 0; use integers"
            )
        return _PLAIN_TYPES["number"]


def _at(path: str, keyword: str) -> str:
    return f"{path}.{keyword}" if path else keyword


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
