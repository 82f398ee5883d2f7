"""Grammars as llama.cpp reads them, on the real vocabulary: what a schema's grammar lets through, and what is chosen under it."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from services.llm.adapters.model_file import default_path
from services.llm.core.choose import Floats, Scratch, draw
from services.llm.core.gbnf import Rules, through
from services.llm.core.schema import schema_symbol
from services.llm.core.wire import Constraint
from services.llm.host.grammar import Alphabet, Constrained, Grammar, GrammarError
from services.llm.host.llama import LlamaError, Model, start_backend, stop_listening


@pytest.fixture(scope="module")
def alphabet() -> Alphabet:
    start_backend()
    vocabulary = Model.load(str(default_path()), vocabulary_only=True).vocabulary
    stop_listening()
    return Alphabet(vocabulary, vocabulary.ends())


def grammar_text(schema: object) -> str:
    rules = Rules()
    return rules.text(schema_symbol(rules, schema, strict=True))


def accepts(alphabet: Alphabet, grammar: str, text: str) -> bool:
    """Return whether the whole text is what the grammar allows."""
    reader = Grammar(alphabet.vocabulary, grammar)
    try:
        for token in alphabet.vocabulary.tokenize(text.encode(), parse_special=False):
            if not reader.allows(token):
                return False
            reader.accept(token)
        return bool(reader.allowed(alphabet.ends).all())
    finally:
        reader.close()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": -1, "maximum": 150},
        "nick": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"enum": ["a", 'q"\\', "ü"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["v"], "additionalProperties": False}},
}  # fmt: skip
LET_THROUGH: list[tuple[object, list[str], list[str]]] = [
    (
        PERSON,
        ['{"name": "Anna", "age": 150}', '{"name":"\\u00fc","age":-1,"nick":null,"tags":["q\\"\\\\","ü"]}', '{\n  "name": "x",\n  "age": 0\n}'],
        ['{"name": "", "age": 3}', '{"age": 3}', '{"name": "Anna", "age": 151}', '{"name": "Anna", "age": 07}', '{"name": "A", "age": 1, "x": 1}', '{"name": "A", "age": 1, "tags": ["a","a","a"]}', '{"name": "A\n", "age": 1}', '{"name": "A", "age": 1,}', '{"name": "A", "age": 1} '],
    ),
    (TREE, ['{"v": 1, "sub": [{"v": 2, "sub": []}]}'], ['{"sub": []}', '{"v": 1, "sub": [1]}']),
    ({"type": "integer", "exclusiveMinimum": 5, "maximum": 21}, ["6", "21", "10"], ["5", "22", "-6", "06", "6.0"]),
    ({"type": "integer", "maximum": -3}, ["-3", "-999"], ["-2", "0", "3"]),
    ({"type": "number"}, ["1", "-0.5", "1e9", "2.5E-3"], ["+1", ".5", "1.", "01", "NaN", "1e999"]),
    ({"type": "number", "minimum": 0}, ["0.5", "3"], ["-1"]),
    ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}, ['"AB-1"', '"AB-123"'], ['"A-1"', '"AB-"', '"xAB-1"', '"AB-1x"']),
    ({"type": "string", "pattern": "b+"}, ['"b"', '"abbc"'], ['"a"', '""']),
    ({"type": "string", "pattern": '^(a|"\\\\|\\n)$'}, ['"a"', '"\\"\\\\"', '"\\n"'], ['"b"', '""', '"""']),
    ({"type": "string", "pattern": "^a$|^b"}, ['"a"', '"bc"'], ['"ac"', '"c"']),
    ({"type": "string", "format": "date"}, ['"2024-12-31"', '"2023-02-28"'], ['"2023-02-30"', '"2024-13-01"']),
    ({"type": "string", "format": "email"}, ['"a.b@example.org"'], ['"a@"', '"@b.c"']),
    ({"const": {"a": [1, None]}}, ['{"a": [1, null]}'], ['{"a": [1]}']),
    ({"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False}, ["[1, null]"], ["[1]", "[1, null, 2]"]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, ["[true,false]"], ["[true]", "[true,true,true,true]"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, ['{"x": 1, "y": 2}'], ["{}", '{"x": "1"}']),
    ({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}]}, ["null", '{"a": null}'], ["{}", "3"]),
    ({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "n": {"type": "null"}}, "required": ["k", "n"]}, {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]}, ['{"k": "b"}', '{"k": "a", "n": null}'], ['{"k": "a"}', '{"k": "c"}']),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]}, ['{"a": 1, "b": null}'], ['{"a": 1}', '{"b": null}']),
    ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a", "z"]}, ['{"a": 3, "z": [1, {"y": "\\ud7ff"}]}'], ['{"a": 3}', '{"a": 3, "z": "\\ud800"}']),
    ({}, ["null", '{"a": [1, 2, {"b": "c"}]}', "[]"], ["", "nul", "{'a': 1}", "[1,]"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), LET_THROUGH)
def test_a_schemas_grammar_lets_through_what_obeys_it(
    alphabet: Alphabet, schema: Any, good: list[str], bad: list[str]
) -> None:
    grammar = grammar_text(schema)
    for text in good:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(alphabet, grammar, text), text
    for text in bad:
        assert not accepts(alphabet, grammar, text), text


class Dice:
    """A picker that draws from whatever weights it is given, and notes what was accepted."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._scratch = Scratch(vocabulary)
        self._random = np.random.default_rng(seed).random
        self.accepted: list[int] = []

    def pick(self, logits: Floats) -> int:
        return draw(logits, self._scratch, temperature=1.0, random=self._random)

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def close(self) -> None:
        pass


def written(alphabet: Alphabet, constraint: Constraint, seed: int, favoured: str, most: int = 400) -> str:
    """Return what a model writes that has no idea at all, but likes some characters, until it may end."""
    dice = Dice(alphabet.vocabulary.size, seed)
    chooser = Constrained(dice, constraint, alphabet)
    likes = np.zeros(alphabet.vocabulary.size, np.float32)
    for character in favoured:
        likes[alphabet.vocabulary.tokenize(character.encode(), parse_special=False)] = 9.0
    likes[alphabet.ends] = 14.0
    text = b""
    try:
        for _ in range(most):
            token = chooser.choose(likes.copy(), 0)
            if token in alphabet.ends:
                return text.decode()
            text += alphabet.vocabulary.piece(token, special=False)
    finally:
        chooser.close()
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schema", [schema for schema, _, _ in LET_THROUGH])
def test_whatever_is_chosen_under_a_grammar_obeys_the_schema(alphabet: Alphabet, schema: Any, seed: int) -> None:
    text = written(alphabet, Constraint(grammar_text(schema)), seed, '"}],0123')
    jsonschema.validate(json.loads(text), schema)


def test_a_seed_gives_the_same_text_again(alphabet: Alphabet) -> None:
    constraint = Constraint(grammar_text(PERSON))
    assert written(alphabet, constraint, 7, '"}') == written(alphabet, constraint, 7, '"}')


def test_the_distribution_is_that_of_the_allowed_tokens(alphabet: Alphabet) -> None:
    """Refusing and choosing again must not change how likely the allowed ones are beside each other."""
    yes, no, other = (alphabet.vocabulary.tokenize(word, parse_special=False)[0] for word in (b"a", b"b", b"c"))
    logits = np.full(alphabet.vocabulary.size, -30.0, np.float32)
    logits[[yes, no, other]] = np.log([0.3, 0.1, 0.6])
    dice = Dice(alphabet.vocabulary.size, 1)
    for _ in range(600):
        chooser = Constrained(dice, Constraint('root ::= "a" | "b"'), alphabet)
        chooser.choose(logits.copy(), 0)
        chooser.close()
    share = dice.accepted.count(yes) / len(dice.accepted)
    assert set(dice.accepted) == {yes, no}
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 600) ** 0.5


def test_the_grammar_holds_only_after_its_trigger(alphabet: Alphabet) -> None:
    constraint = Constraint('root ::= [0-9]+ "!"', triggers=("call:",))
    dice = Dice(alphabet.vocabulary.size, 3)
    chooser = Constrained(dice, constraint, alphabet)
    text = b""
    for word in ("Well ", "now ", "ca", "ll:x", "y"):
        logits = np.full(alphabet.vocabulary.size, -40.0, np.float32)
        for token in alphabet.vocabulary.tokenize(word.encode(), parse_special=False)[:1]:
            logits[token] = 10.0
        logits[alphabet.vocabulary.tokenize(b"l", parse_special=False)] = -20.0
        text += alphabet.vocabulary.piece(chooser.choose(logits, 0), special=False)
        if text.endswith(b"call"):
            break
    assert text.startswith(b"Well")
    chooser.close()


def test_a_token_that_reaches_beyond_the_trigger_must_begin_what_the_grammar_wants(alphabet: Alphabet) -> None:
    vocabulary = alphabet.vocabulary
    good, bad = (vocabulary.tokenize(text, parse_special=False)[0] for text in (b'{"', b"{'"))
    assert [vocabulary.piece(token, special=False) for token in (good, bad)] == [b'{"', b"{'"]
    logits = np.full(vocabulary.size, -40.0, np.float32)
    logits[bad], logits[good] = 20.0, 5.0
    chooser = Constrained(Dice(vocabulary.size, 1), Constraint('root ::= "\\"a"', triggers=("{",)), alphabet)
    assert chooser.choose(logits, 0) == good
    chooser.close()


def test_an_anchored_trigger_counts_only_at_the_beginning(alphabet: Alphabet) -> None:
    vocabulary = alphabet.vocabulary
    (word,), (brace,) = (vocabulary.tokenize(text, parse_special=False) for text in (b"Well", b"{"))
    chooser = Constrained(
        Dice(vocabulary.size, 1), Constraint('root ::= "x"', triggers=("{",), anchored=True), alphabet
    )
    for token in (word, brace, word):
        logits = np.full(vocabulary.size, -60.0, np.float32)
        logits[token] = 10.0
        assert chooser.choose(logits, 0) == token
    chooser.close()


def test_a_grammar_without_a_continuation_is_an_error_of_its_own(alphabet: Alphabet) -> None:
    chooser = Constrained(
        Dice(alphabet.vocabulary.size, 1), Constraint('root ::= "a" loop\nloop ::= "b" loop'), alphabet
    )
    logits = np.zeros(alphabet.vocabulary.size, np.float32)
    logits[alphabet.first == ord("a")] = -np.inf
    with pytest.raises(GrammarError, match="no token"):
        chooser.choose(logits, 0)
    chooser.close()


@pytest.mark.parametrize("grammar", ["root ::= root", 'root ::= "a', "root ::= missing", 'start ::= "a"', "root ::= {"])
def test_llama_cpp_refuses_a_broken_grammar_without_dying(alphabet: Alphabet, grammar: str) -> None:
    with pytest.raises(LlamaError):
        Grammar(alphabet.vocabulary, grammar)


def test_text_through_a_marker_is_read_by_llama_cpp(alphabet: Alphabet) -> None:
    rules = Rules()
    grammar = rules.text(f'{through(rules, "</think>")} "yes"')
    assert accepts(alphabet, grammar, "Hmm < </thin k> ok</think>yes")
    assert not accepts(alphabet, grammar, "Hmm</think> no</think>yes")
