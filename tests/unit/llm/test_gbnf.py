"""GBNF as text: literals, sets, number ranges, and what a caller's grammar may look like."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.errors import DomainError
from services.llm.core.gbnf import (
    MOST_BYTES,
    GrammarSizeError,
    Rules,
    check_grammar,
    digits_between,
    literal,
    normal,
    one_of,
    repeated,
    through,
    without,
)


def as_expression(alternative: str) -> str:
    """Return digits in GBNF as a regular expression: literals lose their quotes, sequences their spaces."""
    return alternative.replace('"', "").replace(" ", "")


@given(low=st.integers(0, 10**6), span=st.integers(0, 10**6), other=st.integers(0, 3 * 10**6))
def test_a_range_of_numbers_is_exactly_the_texts_of_its_numbers(low: int, span: int, other: int) -> None:
    alternatives = [as_expression(each) for each in digits_between(low, low + span, 16)]
    matches = any(re.fullmatch(each, str(other)) for each in alternatives)
    assert matches == (low <= other <= low + span)


@given(low=st.integers(0, 10**5), other=st.integers(0, 10**9))
def test_a_range_without_an_end_begins_where_it_says(low: int, other: int) -> None:
    alternatives = [as_expression(each) for each in digits_between(low, None, 16)]
    assert any(re.fullmatch(each, str(other)) for each in alternatives) == (other >= low)


def test_a_range_has_no_leading_zeros() -> None:
    alternatives = [as_expression(each) for each in digits_between(0, 150, 16)]
    assert not any(re.fullmatch(each, text) for each in alternatives for text in ("007", "00", "151"))


def test_quotes_and_backslashes_of_a_literal_cannot_end_it() -> None:
    assert literal('a"b\\c\n') == '"a\\x22b\\x5Cc\\x0A"'
    assert literal("ü😀") == '"\\xFC\\U0001F600"'


def test_a_set_escapes_what_means_something_in_sets() -> None:
    assert one_of(((0x5B, 0x5E),)) == "[\\x5B-\\x5E]"
    assert one_of(((0x61, 0x7A),), but=True) == "[^a-z]"


def test_repetitions_say_how_often() -> None:
    assert [repeated("a", *bounds) for bounds in ((1, 1), (0, None), (2, None), (0, 3))] == [
        "a",
        "a*",
        "a{2,}",
        "a{0,3}",
    ]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10)), max_size=5), st.lists(st.integers(0, 70), max_size=9)
)
def test_sets_are_joined_and_taken_apart_like_sets(spans: list[tuple[int, int]], taken: list[int]) -> None:
    ranges = normal((low, low + length) for low, length in spans)
    gone = normal((each, each) for each in taken)
    wanted = {code for low, length in spans for code in range(low, low + length + 1)}
    assert {code for low, high in ranges for code in range(low, high + 1)} == wanted
    left = {code for low, high in without(ranges, gone) for code in range(low, high + 1)}
    assert left == wanted - set(taken)


def test_equal_rules_are_one_rule() -> None:
    rules = Rules()
    assert rules.add('"a"') == rules.add('"a"')
    assert rules.text("r1").count("::=") == 2


def test_a_grammar_under_construction_cannot_grow_for_ever() -> None:
    rules = Rules(100)
    for number in range(6):
        rules.add(f'"{number}"')
    with pytest.raises(GrammarSizeError, match="100 bytes"):
        rules.add("x" * 90)


def read(rules: Rules, name: str, text: str) -> bool:
    """Return whether a text is all of what a rule of single characters and successors allows: a state machine."""
    bodies = dict(line.split(" ::= ", 1) for line in rules.text(name).splitlines())
    state: str | None = name
    for character in text:
        if state is None:
            return False
        for step in bodies[state].split(" | "):
            symbol, *following = step.split(" ")
            inside = symbol[1:-1]
            hit = character not in inside[1:] if symbol.startswith("[^") else character == inside
            if hit:
                state = following[0] if following else None
                break
    return state is None


@given(st.text("<ab>", max_size=20))
def test_text_up_to_a_marker_ends_at_its_first_appearance(text: str) -> None:
    rules = Rules()
    name = through(rules, "<a><b>")
    assert read(rules, name, text + "<a><b>") == ("<a><b>" not in (text + "<a><b>")[:-1])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("x" * (MOST_BYTES + 1), "at most"),
        ("hello", "has no rule"),
        ('root ::= "a\0"', "zero character"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "more than 64 deep"),
        ("root ::= <[12]>", "'<'"),
    ],
)
def test_a_callers_grammar_is_looked_at_before_llama_cpp_sees_it(grammar: str, words: str) -> None:
    with pytest.raises(DomainError) as caught:
        check_grammar(grammar, "options.structure.grammar")
    assert words in caught.value.message
    assert caught.value.field == "options.structure.grammar"


def test_brackets_in_literals_sets_and_comments_do_not_count() -> None:
    check_grammar('root ::= "' + "(" * 100 + '\\"<" [(<\\]"] # ' + "(" * 100 + "\n", "grammar")
