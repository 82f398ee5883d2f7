"""Taking answers apart: thoughts, calls and text, however the text is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.answer import Called, Part, Said, Splitter, State, Thought
from services.llm.core.dialect import Thinking, ToolFormat

THINK = Thinking("<think>", "</think>", switched=True)


def split(
    text: str,
    cuts: list[int] | None = None,
    *,
    thinking: Thinking | None = None,
    inside: bool = False,
    tools: ToolFormat | None = None,
) -> tuple[list[Part], Splitter]:
    """Return the parts of a text that comes in pieces."""
    splitter = Splitter(thinking, inside=inside, tools=tools)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or range(len(text)))})
    parts: list[Part] = []
    for start, end in itertools.pairwise(edges):
        parts += splitter.push(text[start:end])
    return parts + splitter.end(), splitter


def said(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Said))


def thought(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thought))


def calls(parts: list[Part]) -> list[tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, Called):
            name, arguments = found.get(part.index, ("", ""))
            assert not (name and part.name), "a name comes once"
            found[part.index] = (name or part.name, arguments + part.arguments)
    return [found[index] for index in sorted(found)]


CUTS = st.lists(st.integers(0, 400), max_size=30)
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\"is</tool_call>", "days": [1, {"a": 2}]}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


@given(CUTS)
def test_tagged_calls_come_out_whole_however_they_are_cut(cuts: list[int]) -> None:
    parts, splitter = split(TWO_CALLS, cuts, tools=ToolFormat.TAGGED)
    assert said(parts).strip() == "Let me see."
    assert [name for name, _ in calls(parts)] == ["weather", "now"]
    assert json.loads(calls(parts)[0][1]) == {"city": 'Par"is</tool_call>', "days": [1, {"a": 2}]}
    assert calls(parts)[1][1] == "{}"
    assert splitter.calls == 2


@given(CUTS)
def test_listed_calls_come_out_whole(cuts: list[int]) -> None:
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {"x": [1, 2]}, "id": "abcdefghi"}, {"name": "b", "arguments": {}, "id": "123456789"}]'
    parts, _ = split(text, cuts, tools=ToolFormat.LISTED)
    assert said(parts) == ""
    assert calls(parts) == [("a", '{"x": [1, 2]}'), ("b", "{}")]


@given(CUTS)
def test_a_bare_call_is_the_whole_answer(cuts: list[int]) -> None:
    parts, splitter = split('\n{"name": "a", "parameters": {"x": "y"}}', cuts, tools=ToolFormat.BARE)
    assert said(parts) == ""
    assert calls(parts) == [("a", '{"x": "y"}')]
    assert splitter.calls == 1


@given(CUTS)
def test_a_bare_call_inside_of_an_answer_is_text(cuts: list[int]) -> None:
    text = 'For example {"name": "a", "parameters": {}} would do.'
    parts, _ = split(text, cuts, tools=ToolFormat.BARE)
    assert said(parts) == text
    assert calls(parts) == []


@given(CUTS)
def test_thoughts_are_kept_apart_and_no_mark_shows(cuts: list[int]) -> None:
    parts, _ = split("<think>\nFirst, <b> then.\n</think>\n\nFour < five.", cuts, thinking=THINK)
    assert thought(parts) == "First, <b> then."
    assert said(parts) == "Four < five."


@given(CUTS)
def test_thoughts_that_the_prompt_has_opened_need_no_opening(cuts: list[int]) -> None:
    parts, _ = split("Hm.\n</think>\n\nYes.", cuts, thinking=THINK, inside=True)
    assert (thought(parts), said(parts)) == ("Hm.", "Yes.")


@given(CUTS)
def test_thoughts_then_a_call(cuts: list[int]) -> None:
    text = 'I need <tool_call> here.\n</think>\n\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    parts, _ = split(text, cuts, thinking=THINK, inside=True, tools=ToolFormat.TAGGED)
    assert thought(parts) == "I need <tool_call> here."
    assert said(parts) == ""
    assert calls(parts) == [("a", "{}")]


@given(CUTS)
def test_a_closing_mark_without_an_opening_does_not_leak(cuts: list[int]) -> None:
    parts, _ = split("Yes.</think> No.", cuts, thinking=THINK)
    assert said(parts) == "Yes. No."


def test_thoughts_without_an_end_are_thoughts() -> None:
    parts, splitter = split("<think>and on and on </thi", thinking=THINK)
    assert thought(parts) == "and on and on </thi"
    assert said(parts) == ""
    assert splitter.state is State.THINKING


@given(CUTS)
def test_what_begins_like_a_call_and_is_none_is_said(cuts: list[int]) -> None:
    text = "Use <tool_call> [tags] for calls."
    parts, _ = split(text, cuts, tools=ToolFormat.TAGGED)
    assert said(parts).replace(" ", "") == text.replace(" ", "")
    assert calls(parts) == []


def test_a_call_that_is_cut_short_tells_what_there_is_of_its_arguments() -> None:
    parts, splitter = split('<tool_call>{"name": "a", "arguments": {"x": "y', tools=ToolFormat.TAGGED)
    assert calls(parts) == [("a", '{"x": "y')]
    assert splitter.calls == 0
    parts, _ = split('<tool_call>{"na', tools=ToolFormat.TAGGED)
    assert said(parts) == '<tool_call>{"na'


def test_arguments_before_the_name_wait_for_it() -> None:
    parts, _ = split('<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>', tools=ToolFormat.TAGGED)
    assert calls(parts) == [("a", '{"x": 1}')]


def test_the_first_piece_has_the_name_and_arguments_follow_as_they_come() -> None:
    splitter = Splitter(None, inside=False, tools=ToolFormat.TAGGED)
    pieces = [
        splitter.push(text) for text in ('<tool_call>{"name": "a", "argu', 'ments": {"x"', ": 1}", "}</tool_call>")
    ]
    assert pieces == [[Called(0, "a", "")], [Called(0, "", '{"x"')], [Called(0, "", ": 1}")], []]


@given(st.text('<>/ab{} \n"', max_size=60), CUTS)
def test_nothing_is_lost_where_no_mark_is(text: str, cuts: list[int]) -> None:
    parts, _ = split(text, cuts, tools=ToolFormat.TAGGED)
    assert said(parts) == text


@pytest.mark.parametrize("tools", [*ToolFormat, None])
@given(text=st.text(max_size=80), cuts=CUTS)
def test_any_text_can_be_taken_apart(tools: ToolFormat | None, text: str, cuts: list[int]) -> None:
    split(text, cuts, thinking=THINK, tools=tools)
