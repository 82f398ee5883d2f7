"""Tools: what the model is told about them, what of an earlier conversation it sees, and the grammar of its calls."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from services.kit.errors import DomainError, Reason
from services.llm.core.dialect import OPENINGS, Dialect, ToolFormat
from services.llm.core.gbnf import Rules, either, literal
from services.llm.core.prompt import Call, Turn
from services.llm.core.structure import schema_rule
from services.llm.core.toolbox import Tool, Toolbox, Use

_NO_PARAMETERS: Final = '{"type": "object", "properties": {}}'
_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")


def described(box: Toolbox) -> list[dict[str, Any]]:
    """Return the offered tools as templates and OpenAI's API have them. Raises DomainError for a schema that is no JSON."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": _parameters(tool, place)},
        }
        for place, tool in enumerate(box.offered)
    ]


def _parameters(tool: Tool, place: int) -> Any:  # noqa: ANN401 - any JSON value
    field = f"tools[{place}].parameters_json"
    try:
        found = json.loads(tool.parameters or _NO_PARAMETERS)
    except (ValueError, RecursionError) as error:
        raise _refusal(field, f"is no JSON: {error}"[:200]) from None
    if not isinstance(found, dict):
        raise _refusal(field, "must be a JSON schema: an object")
    return found


# ---- what the model sees -----------------------------------------------------------------------------------------


def told(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], dialect: Dialect) -> tuple[Turn, ...]:
    """Return the conversation as the model's template can take it.

    A template without tools of its own gets earlier calls and results as text, and the tools in the system message.
    """
    if dialect.native:
        return tuple(_with_short_ids(turn) for turn in turns) if dialect.format is ToolFormat.LISTED else tuple(turns)
    plain = _plain(turns)
    if not tools:
        return tuple(plain)
    description = _description(tools)
    if plain and plain[0].role in {"system", "developer"}:
        first = replace(plain[0], texts=(*plain[0].texts, f"\n\n{description}"))
        return (first, *plain[1:])
    return (Turn("system", (description,)), *plain)


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions; each line is one of them, with the JSON schema of its arguments:\n"
        f"{listed}\n"
        "When a function is needed, answer with nothing but the call, written like this:\n"
        '<tool_call>\n{"name": "the function", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
        "Its result comes in the next message between <tool_response> and </tool_response>."
    )


def _plain(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns without calls and results: they are text; results that follow each other are one message."""
    found: list[Turn] = []
    results = False
    for turn in turns:
        if turn.role == "tool":
            text = f"<tool_response>\n{''.join(turn.texts)}\n</tool_response>"
            if results:
                found[-1] = replace(found[-1], texts=(*found[-1].texts, f"\n{text}"))
            else:
                found.append(Turn("user", (text,)))
            results = True
            continue
        results = False
        if turn.calls:
            spoken = "".join(turn.texts)
            parts = [*([spoken] if spoken else []), *(_as_text(call) for call in turn.calls)]
            turn = replace(turn, texts=("\n".join(parts),), calls=())  # noqa: PLW2901 - the same turn, told otherwise
        found.append(turn)
    return found


def _as_text(call: Call) -> str:
    arguments = call.arguments if call.parsed is None else json.dumps(dict(call.parsed), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def _with_short_ids(turn: Turn) -> Turn:
    """Return a turn whose call ids have nine letters and digits: Mistral's templates refuse any other."""
    calls = tuple(replace(call, identity=_short(call.identity)) for call in turn.calls)
    return replace(turn, calls=calls, answers=None if turn.answers is None else _short(turn.answers))


def _short(identity: str) -> str:
    return identity if _ID.fullmatch(identity) else sha256(identity.encode()).hexdigest()[:9]


# ---- what the model writes ---------------------------------------------------------------------------------------

_SPACE: Final = '"\\n"{0,2}'
_KEYS: Final = {ToolFormat.TAGGED: "arguments", ToolFormat.BARE: "parameters", ToolFormat.LISTED: "arguments"}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Symbols of the calls: `whole` with their opening, `rest` what follows it."""

    whole: str
    rest: str


def call_grammar(rules: Rules, box: Toolbox, format_: ToolFormat) -> CallGrammar:
    """Add the rules of the calls. Raises DomainError for a schema that cannot be obeyed, naming the tool."""
    chosen = [
        (place, tool) for place, tool in enumerate(box.offered) if box.use is not Use.NAMED or tool.name == box.name
    ]
    several = box.parallel and box.use is not Use.NAMED
    bodies = [f"{literal(tool.name)} {_body(rules, tool, place, format_)}" for place, tool in chosen]
    body = rules.add(either(bodies))
    write: dict[ToolFormat, Callable[[Rules, str, bool], str]] = {
        ToolFormat.TAGGED: _tagged,
        ToolFormat.BARE: lambda rules, body, _: rules.add(body),
        ToolFormat.LISTED: _listed,
    }
    rest = write[format_](rules, body, several)
    return CallGrammar(f"{literal(OPENINGS[format_][0])} {rest}", rest)


def _body(rules: Rules, tool: Tool, place: int, format_: ToolFormat) -> str:
    """Return what follows a function's name up to the closing brace."""
    field = f"tools[{place}].parameters_json"
    arguments = schema_rule(
        rules, tool.parameters or _NO_PARAMETERS, strict=tool.strict, field=field, only_objects=True
    )
    identity = ' ", \\"id\\": \\"" [a-zA-Z0-9]{9} "\\""' if format_ is ToolFormat.LISTED else ""
    return f'"\\", \\"{_KEYS[format_]}\\": " {arguments}{identity} "}}"'


def _tagged(rules: Rules, body: str, several: bool) -> str:  # noqa: FBT001 - one of a table
    call = rules.add(f'{_SPACE} "{{\\"name\\": \\"" {body} {_SPACE} "</tool_call>"')
    return f'{call} ({_SPACE} "<tool_call>" {call})*' if several else call


def _listed(rules: Rules, body: str, several: bool) -> str:  # noqa: FBT001 - one of a table
    call = rules.add(f'"{{\\"name\\": \\"" {body}')
    more = f' ("," " "? {call})*' if several else ""
    return f'" "? "[" {call}{more} "]"'


def _refusal(path: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {sentence}", field=path)
