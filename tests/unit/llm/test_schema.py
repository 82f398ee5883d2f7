"""JSON schemas as grammars: what is refused, where, and that compiling is bounded. What the grammars allow is tested with
llama.cpp in tests/service/test_llm_grammar.py."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.errors import DomainError, Reason
from services.llm.core.gbnf import Rules
from services.llm.core.schema import MOST_DEPTH, schema_symbol
from services.llm.core.schema_scalars import SchemaError
from services.llm.core.structure import Structure, StructureKind, grammar_of


def compiled(schema: object, *, strict: bool = True) -> str:
    rules = Rules()
    return rules.text(schema_symbol(rules, schema, strict=strict))


def refused(schema: object, *, strict: bool = True) -> SchemaError:
    with pytest.raises(SchemaError) as caught:
        compiled(schema, strict=strict)
    return caught.value


def member(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"it": schema}, "required": ["it"], "additionalProperties": False}


INEXPRESSIBLE = [
    ({"not": {"type": "string"}}, "not"),
    ({"type": "number", "maximum": 3.5}, "maximum"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"type": "string", "pattern": "a^b"}, "pattern"),
    ({"type": "string", "pattern": "(a*)*"}, "pattern"),
    ({"type": "string", "pattern": "["}, "pattern"),
    ({"type": "string", "pattern": "^a$", "maxLength": 3}, "pattern"),
    ({"type": "string", "format": "iri"}, "format"),
    ({"type": "string", "maxLength": 5000}, "maxLength"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "null"}}, "contains"),
    ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, "propertyNames"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 0}, ""),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"enum": ["a", "b"], "minLength": 1}, "minLength"),
    ({"type": "string", "minlength": 3}, "minlength"),
    ({"if": {}, "then": {}}, "if"),
]


@pytest.mark.parametrize(("schema", "path"), INEXPRESSIBLE)
def test_what_no_grammar_expresses_is_refused_when_strict_with_its_place(schema: dict[str, Any], path: str) -> None:
    error = refused(member(schema))
    assert error.path == (f"properties.it.{path}" if path else "properties.it")
    assert error.inexpressible


@pytest.mark.parametrize(("schema", "path"), INEXPRESSIBLE)
def test_without_strict_it_is_left_out(schema: dict[str, Any], path: str) -> None:
    assert "root ::=" in compiled(member(schema), strict=False)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (3, ""),
        ({"type": "text"}, "type"),
        ({"type": []}, "type"),
        (False, ""),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "object", "required": "a"}, "required"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
        ({"type": "array", "items": [{}]}, "items"),
        ({"type": "array", "minItems": -1}, "minItems"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems"),
        ({"type": "array", "minItems": 3000}, "minItems"),
        ({"type": "string", "minLength": "1"}, "minLength"),
        ({"type": "integer", "minimum": 4, "maximum": 3}, ""),
        ({"type": "integer", "minimum": "4"}, "minimum"),
        ({"type": "integer", "minimum": 10**30}, "minimum"),
        ({"enum": []}, "enum"),
        ({"enum": ["a"], "type": "integer"}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"allOf": {}}, "allOf"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"$ref": 3}, "$ref"),
        ({"$ref": ["#"]}, "$ref"),
        ({"type": "string", "maxLength": None}, "maxLength"),
        ({"type": "integer", "minimum": float("nan")}, "minimum"),
        ({"const": float("inf")}, ""),
    ],
)
def test_what_is_broken_is_refused_strict_or_not(schema: object, path: str) -> None:
    for strict in (True, False):
        assert refused(schema, strict=strict).path == path


def test_a_reference_that_leads_back_to_itself_is_refused() -> None:
    assert "back to itself" in refused({"$ref": "#"}).why
    assert "back to itself" in refused({"anyOf": [{"type": "null"}, {"$ref": "#"}]}).why
    around = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert "back to itself" in refused(around).why
    assert "nested deeper" in refused({"allOf": [{"$ref": "#"}], "type": "object"}).why


def test_a_reference_from_inside_an_object_may_lead_back() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert compiled(tree).count("::=") < 20


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MOST_DEPTH + 5):
        schema = {"type": "array", "items": schema}
    assert "nested deeper" in refused(schema).why


def test_a_schema_with_too_many_places_is_refused() -> None:
    assert "too many" in refused({"anyOf": [{"type": "null"}] * 5000}).why
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3900)}}
    assert "too large" in refused(wide).why


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "prefixItems"])
def test_a_schema_that_multiplies_through_references_stays_small(keyword: str) -> None:
    levels = {f"l{n}": {keyword: [{"$ref": f"#/$defs/l{n + 1}"}, {"$ref": f"#/$defs/l{n + 1}"}]} for n in range(15)}
    schema = {"$ref": "#/$defs/l0", "$defs": levels | {"l15": {"type": "object"}}}
    assert len(compiled(schema)) < 20_000


def test_values_that_are_too_long_are_refused() -> None:
    assert "too large" in refused({"enum": ["x" * 300_000]}).why


def test_members_that_describe_are_ignored() -> None:
    schema = {"title": "T", "description": "D", "default": 3, "examples": [1], "x-mine": 1, "type": "integer"}
    assert compiled(schema) == compiled({"type": "integer"})


@given(
    st.recursive(
        st.sampled_from([{"type": "string"}, {"type": "integer", "minimum": 3}, {"const": "ü"}, True, {}]),
        lambda inner: st.one_of(
            st.builds(lambda item: {"type": "array", "items": item, "maxItems": 3}, inner),
            st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
            st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
            st.builds(lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "required": ["b"]}, inner, inner),
        ),
        max_leaves=8,
    )
)
def test_any_mixture_becomes_a_grammar_or_a_refusal(schema: object) -> None:
    for strict in (True, False):
        with contextlib.suppress(SchemaError):
            assert "root ::= " in compiled(schema, strict=strict)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["type", "properties", "items", "$ref", "anyOf", "allOf", "oneOf", "enum", "const", "required", "pattern",
                     "minLength", "maximum", "additionalProperties", "prefixItems", "format", "a"]), inner, max_size=4), max_leaves=12))  # fmt: skip
def test_garbage_is_refused_and_never_crashes(schema: object) -> None:
    for strict in (True, False):
        with contextlib.suppress(SchemaError):
            compiled(schema, strict=strict)


def test_errors_name_the_schemas_place_in_the_contract() -> None:
    text = json.dumps(member({"type": "string", "pattern": "(?!a)"}))
    with pytest.raises(DomainError) as caught:
        grammar_of(Structure(StructureKind.JSON_SCHEMA, text, strict=True))
    assert caught.value.reason is Reason.UNSUPPORTED
    assert caught.value.field == "options.structure.json_schema.schema_json.properties.it.pattern"


@pytest.mark.parametrize("text", ["{", "[" * 100_000, ""])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(DomainError, match="is no JSON") as caught:
        grammar_of(Structure(StructureKind.JSON_SCHEMA, text))
    assert caught.value.reason is Reason.INVALID_REQUEST
