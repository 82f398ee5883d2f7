"""Functions that the model may call, and whether it must."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from facade.translate.fields import AnyObject, Boolean, Choice, Custom, ListOf, Text, refuse, wrong_type
from facade.translate.messages import FUNCTION_NAME, unsupported
from facade.translate.record import Field, record
from omniserve.llm.v1 import llm_pb2

_NO_PARAMETERS = {"type": "object", "properties": {}}
_FUNCTION = record(
    [
        Field("name", FUNCTION_NAME, "The function's name.", required=True),
        Field("description", Text(), "What it does; the model reads it."),
        Field("parameters", AnyObject(), "JSON schema of its arguments; absent means none."),
        Field("strict", Boolean(), "Arguments must obey the schema."),
    ]
)
_TOOL = record(
    [
        Field("type", Choice(("function",)), "Always function.", required=True),
        Field("function", _FUNCTION, "The function.", required=True),
    ]
)
_NAMED = record([Field("name", FUNCTION_NAME, "The function.", required=True)])
_NAMED_TOOL = record(
    [
        Field("type", Choice(("function",)), "Always function.", required=True),
        Field("function", _NAMED, "The function.", required=True),
    ]
)
_ALLOWED = record(
    [
        Field("mode", Choice(("auto", "required")), "Whether one must be called.", required=True),
        Field("tools", ListOf(_NAMED_TOOL, fewest=1, most=128), "Those that may be called.", required=True),
    ]
)
_ALLOWED_TOOLS = record(
    [
        Field("type", Choice(("allowed_tools",)), "Always allowed_tools.", required=True),
        Field("allowed_tools", _ALLOWED, "Those that may be called.", required=True),
    ]
)
_KINDS = {
    "auto": llm_pb2.ToolChoice.KIND_AUTO,
    "none": llm_pb2.ToolChoice.KIND_NONE,
    "required": llm_pb2.ToolChoice.KIND_REQUIRED,
}


def _read_tool(value: object, path: str) -> dict[str, Any]:
    if isinstance(value, dict) and value.get("type") == "custom":
        unsupported(f"{path}.type", "'custom' is not supported; only 'function' is")
    return _TOOL.read(value, path)


def _read_choice(value: object, path: str) -> str | dict[str, Any]:
    if isinstance(value, str):
        return Choice(tuple(_KINDS)).read(value, path)
    if not isinstance(value, dict):
        wrong_type(path, "a string or an object", value)
    kind = value.get("type")
    if kind == "custom":
        unsupported(f"{path}.type", "'custom' is not supported; only 'function' is")
    return (_ALLOWED_TOOLS if kind == "allowed_tools" else _NAMED_TOOL).read(value, path)


TOOL_FIELDS = (
    Field("tools", ListOf(Custom(_read_tool, _TOOL.schema()), most=128), "Functions that the model may call."),
    Field(
        "tool_choice",
        Custom(
            _read_choice,
            {"oneOf": [{"type": "string", "enum": list(_KINDS)}, _NAMED_TOOL.schema(), _ALLOWED_TOOLS.schema()]},
        ),
        "Whether functions are called: none, auto, required, or a named one.",
    ),
    Field("parallel_tool_calls", Boolean(), "Whether several functions may be called at once; absent means yes."),
)


def tools_of(values: Mapping[str, Any]) -> tuple[list[llm_pb2.Tool], llm_pb2.ToolChoice | None]:
    """Translate checked tool fields; DomainError when the choice names a function that was not offered."""
    functions, choice = _functions(values.get("tools", ())), values.get("tool_choice", "auto")
    if not functions:
        if choice not in ("none", "auto"):
            refuse("tool_choice", "is only allowed when 'tools' are given")
        return [], None
    if isinstance(choice, str):
        return _offered(functions), _choice(_KINDS[choice], values)
    if "allowed_tools" in choice:
        allowed = choice["allowed_tools"]
        names = [tool["function"]["name"] for tool in allowed["tools"]]
        for index, name in enumerate(names):
            _must_be_offered(name, functions, f"tool_choice.allowed_tools.tools[{index}].function.name")
        return _offered({name: functions[name] for name in names}), _choice(_KINDS[allowed["mode"]], values)
    name = choice["function"]["name"]
    _must_be_offered(name, functions, "tool_choice.function.name")
    return _offered(functions), _choice(llm_pb2.ToolChoice.KIND_NAMED, values, name)


def _functions(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in functions:
            refuse(f"tools[{index}].function.name", f"is '{name}' a second time")
        functions[name] = tool["function"]
    return functions


def _must_be_offered(name: str, functions: Mapping[str, Any], path: str) -> None:
    if name not in functions:
        refuse(path, f"names '{name}', which is not among 'tools': {', '.join(functions)[:200]}")


def _choice(kind: llm_pb2.ToolChoice.Kind.ValueType, values: Mapping[str, Any], name: str = "") -> llm_pb2.ToolChoice:
    return llm_pb2.ToolChoice(kind=kind, name=name, parallel=values.get("parallel_tool_calls"))


def _offered(functions: Mapping[str, dict[str, Any]]) -> list[llm_pb2.Tool]:
    return [
        llm_pb2.Tool(
            name=name,
            description=function.get("description", ""),
            parameters_json=orjson.dumps(function.get("parameters", _NO_PARAMETERS)).decode(),
            strict=function.get("strict", False),
        )
        for name, function in functions.items()
    ]
