"""Dialects, tools in prompts, the grammar of calls, and when a grammar begins to hold."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.errors import DomainError
from services.llm.core.constrain import constraint_of
from services.llm.core.dialect import Dialect, Thinking, ToolFormat, dialect_of, is_open, settled
from services.llm.core.prompt import Call, Turn
from services.llm.core.structure import Structure, StructureKind
from services.llm.core.toolbox import Tool, Toolbox, Use, check_tools
from services.llm.core.tools import described, told
from services.llm.core.trigger import Watch

SMOL = "{% for message in messages %}{{ message.content }}{% endfor %}"
QWEN = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
THINK = Thinking("<think>", "</think>", switched=False)
WEATHER = Tool(
    "weather", "Tells the weather.", json.dumps({"type": "object", "properties": {"city": {"type": "string"}}})
)
PLAIN = Dialect(ToolFormat.TAGGED, native=False, thinking=None)


@pytest.mark.parametrize(
    ("template", "format_", "native"),
    [
        (SMOL, ToolFormat.TAGGED, False),
        (QWEN, ToolFormat.TAGGED, True),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", ToolFormat.LISTED, True),
        ('{% if tools %}{"name": function name, "parameters": dictionary of argument name}', ToolFormat.BARE, True),
        ("{% if tools %}<tool_call><function=x>", ToolFormat.TAGGED, False),
        ("{% if tools %}[TOOL_CALLS]f[ARGS]{}", ToolFormat.TAGGED, False),
        ("{% if tools %}<|some other way|>", ToolFormat.TAGGED, False),
    ],
)
def test_a_template_tells_how_tools_are_called(template: str, format_: ToolFormat, native: bool) -> None:
    dialect = dialect_of(template)
    assert (dialect.format, dialect.native) == (format_, native)


def test_a_template_tells_how_its_model_thinks() -> None:
    assert dialect_of(SMOL).thinking is None
    assert dialect_of(QWEN).thinking == Thinking("<think>", "</think>", switched=True)
    assert dialect_of("[THINK]x[/THINK]").thinking == Thinking("[THINK]", "[/THINK]", switched=False)


@pytest.mark.parametrize(
    ("prompt", "wanted", "prefill", "result"),
    [
        ("a<think>\n", None, None, "a<think>\n"),
        ("a<think>\n", False, None, "a<think>\n\n\n</think>\n\n"),
        ("a<think>\n", None, "Yes", "a<think>\n\n\n</think>\n\nYes"),
        ("a", False, "Yes", "a<think>\n\n</think>\n\nYes"),
        ("a", True, None, "a"),
        ("a<think>\n\n</think>\n\n", None, None, "a<think>\n\n</think>\n\n"),
    ],
)
def test_no_thinking_means_a_closed_block(prompt: str, wanted: bool | None, prefill: str | None, result: str) -> None:
    assert settled(prompt, THINK, wanted=wanted, prefill=prefill) == result
    assert is_open(result, THINK) == (result.rstrip().endswith("<think>"))


def test_a_template_with_a_switch_is_trusted_with_it() -> None:
    assert settled("a", Thinking("<think>", "</think>", switched=True), wanted=False, prefill=None) == "a"


def test_a_template_without_tools_hears_of_them_in_the_system_message() -> None:
    tools = described(Toolbox((WEATHER,)))
    turns = told([Turn("system", ("Be kind.",)), Turn("user", ("Hi",))], tools, PLAIN)
    assert turns[0].role == "system"
    text = "".join(turns[0].texts)
    assert text.startswith("Be kind.\n\n")
    assert '"weather"' in text
    assert "<tool_call>" in text
    assert told([Turn("user", ("Hi",))], tools, PLAIN)[0].role == "system"
    assert told([Turn("user", ("Hi",))], [], PLAIN) == (Turn("user", ("Hi",)),)


def test_calls_and_results_become_text_for_a_template_that_knows_neither() -> None:
    call = Call("call_1", "weather", '{"city":"Paris"}', {"city": "Paris"})
    turns = told(
        [
            Turn("user", ("Hi",)),
            Turn("assistant", calls=(call,)),
            Turn("tool", ("rain",), answers="call_1"),
            Turn("tool", ("sun",)),
        ],
        [],
        PLAIN,
    )
    assert [turn.role for turn in turns] == ["user", "assistant", "user"]
    assert "".join(turns[1].texts) == '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert "".join(turns[2].texts) == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"


def test_mistrals_templates_get_ids_of_nine_characters_that_still_match() -> None:
    dialect = Dialect(ToolFormat.LISTED, native=True, thinking=None)
    call = Call("call_0123456789abcdef", "weather", "{}", {})
    turns = told([Turn("assistant", calls=(call,)), Turn("tool", ("x",), answers="call_0123456789abcdef")], [], dialect)
    assert len(turns[0].calls[0].identity) == 9
    assert turns[0].calls[0].identity == turns[1].answers


@pytest.mark.parametrize(
    ("box", "field"),
    [
        (Toolbox((Tool("a b"),)), "tools[0].name"),
        (Toolbox((Tool("a"), Tool("a"))), "tools[1].name"),
        (Toolbox((), Use.REQUIRED), "tool_choice"),
        (Toolbox((WEATHER,), Use.NAMED, "other"), "tool_choice.name"),
        (Toolbox(tuple(Tool(f"t{n}") for n in range(129))), "tools"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(box: Toolbox, field: str) -> None:
    with pytest.raises(DomainError) as caught:
        check_tools(box)
    assert caught.value.field == field


@pytest.mark.parametrize("parameters", ["{", "[]", '"x"'])
def test_parameters_that_are_no_schema_are_refused(parameters: str) -> None:
    with pytest.raises(DomainError) as caught:
        described(Toolbox((Tool("a", "", parameters),)))
    assert caught.value.field == "tools[0].parameters_json"


def grammar(box: Toolbox, dialect: Dialect = PLAIN, structure: Structure | None = None, **options: bool):  # type: ignore[no-untyped-def]
    return constraint_of(structure, box, dialect, **({"inside": False, "may_think": False} | options))


def test_auto_waits_for_the_opening_of_a_call() -> None:
    found = grammar(Toolbox((WEATHER,)))
    assert found.triggers == ("<tool_call>",)
    assert '"weather"' in found.grammar


def test_required_holds_from_the_first_token_and_named_knows_one_tool() -> None:
    tools = (WEATHER, Tool("now"))
    assert grammar(Toolbox(tools, Use.REQUIRED)).triggers == ()
    named = grammar(Toolbox(tools, Use.NAMED, "now")).grammar
    assert '"now"' in named
    assert '"weather"' not in named


def test_none_constrains_nothing() -> None:
    assert grammar(Toolbox((WEATHER,), Use.NONE)) is None


def test_structure_beside_tools_is_the_one_or_the_other() -> None:
    found = grammar(Toolbox((WEATHER,)), structure=Structure(StructureKind.JSON_OBJECT))
    assert found.triggers == ()
    assert "tool_call" in found.grammar


def test_a_grammar_of_the_callers_own_cannot_be_combined_with_tools() -> None:
    with pytest.raises(DomainError) as caught:
        grammar(Toolbox((WEATHER,)), structure=Structure(StructureKind.GRAMMAR, 'root ::= "a"'))
    assert caught.value.field == "options.structure.grammar"


def test_thoughts_come_before_what_is_forced() -> None:
    thinking = Dialect(ToolFormat.TAGGED, native=True, thinking=THINK)
    box = Toolbox((WEATHER,), Use.REQUIRED)
    assert grammar(box, thinking, inside=True).inside
    assert '"</think"' not in grammar(box, thinking).grammar
    assert '"<think>"' in grammar(box, thinking, may_think=True).grammar


def test_a_strict_tool_that_no_grammar_can_hold_is_named() -> None:
    tool = Tool("a", "", json.dumps({"type": "object", "properties": {"x": {"not": {}}}}), strict=True)
    with pytest.raises(DomainError) as caught:
        grammar(Toolbox((WEATHER, tool)))
    assert caught.value.field == "tools[1].parameters_json.properties.x.not"


def first(watch: Watch, pieces: list[bytes]) -> bytes | None:
    """Return what has to obey of the pieces."""
    for place, piece in enumerate(pieces):
        watch, rest = watch.seen(piece)
        if rest is not None:
            return rest + b"".join(pieces[place + 1 :])
    return None


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(text), *(each % (len(text) + 1) for each in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 60), max_size=12))
def test_a_trigger_is_found_however_the_text_is_cut(cuts: list[int]) -> None:
    assert first(Watch((b"<call>",)), cut(b"Well, <call <call>{1}", cuts)) == b"{1}"
    assert first(Watch((b"<call>",)), cut(b"Well, <call", cuts)) is None


@given(st.lists(st.integers(0, 60), max_size=12))
def test_an_anchored_trigger_counts_only_at_the_beginning(cuts: list[int]) -> None:
    assert first(Watch((b'{"name": "',), anchored=True), cut(b'\n {"name": "x', cuts)) == b"x"
    assert first(Watch((b'{"name": "',), anchored=True), cut(b'As {"name": "x', cuts)) is None


@given(st.lists(st.integers(0, 60), max_size=12))
def test_what_is_thought_triggers_nothing(cuts: list[int]) -> None:
    marks = (b"<think>", b"</think>")
    assert first(Watch((b"<call>",), thoughts=marks), cut(b"<think>a <call>b</think><call>c", cuts)) == b"c"
    assert first(Watch((b"<call>",), thoughts=marks, inside=True), cut(b"a <call>b</think> <call>c", cuts)) == b"c"
    assert first(Watch((), thoughts=marks, inside=True), cut(b"a < b</think>\nc", cuts)) == b"\nc"
