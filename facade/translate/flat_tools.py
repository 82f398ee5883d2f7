"""Tools of the APIs that name a function beside its type, where chats name it one level deeper."""

from collections.abc import Iterable, Mapping
from typing import Any

from facade.translate.fields import Custom
from facade.translate.messages import unsupported
from facade.translate.record import Record
from facade.translate.tools import tools_of
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError


def own_tool(table: Record, kind: str) -> Custom:
    """Return a reader of the caller's own tools, which `table` describes; the API's built-in ones are refused by their type."""

    def read(value: object, path: str) -> dict[str, Any]:
        given = value.get("type") if isinstance(value, dict) else None
        if isinstance(given, str) and given != kind:
            unsupported(f"{path}.type", f"'{given[:60]}' is not supported; only '{kind}' is")
        return table.read(value, path)

    return Custom(read, table.schema())


def flat_tools_of(
    tools: Iterable[Mapping[str, Any]], choice: str | dict[str, Any], *, parallel: bool | None
) -> tuple[list[llm_pb2.Tool], llm_pb2.ToolChoice | None]:
    """Translate checked tools. `choice`: a word, {name}, or {mode, tools: [{name}]}. DomainError names the flat fields."""
    asked: dict[str, Any] = {"tools": [{"function": tool} for tool in tools], "tool_choice": choice}
    if isinstance(choice, dict) and "tools" in choice:
        nested = [{"function": tool} for tool in choice["tools"]]
        asked["tool_choice"] = {"allowed_tools": {"mode": choice["mode"], "tools": nested}}
    elif isinstance(choice, dict):
        asked["tool_choice"] = {"function": choice}
    if parallel is not None:
        asked["parallel_tool_calls"] = parallel
    try:
        return tools_of(asked)
    except DomainError as error:
        message, path = _flat(error.message), _flat(error.field or "")
        raise DomainError(error.reason, message, field=path, metadata=error.metadata) from None


def _flat(text: str) -> str:
    return text.replace(".function.name", ".name").replace("tool_choice.allowed_tools.", "tool_choice.")
