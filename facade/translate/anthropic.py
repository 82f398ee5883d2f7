"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's bodies become chats."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from facade.translate.chat import Call
from facade.translate.failures import Names, Place
from facade.translate.fields import (
    AnyObject,
    Boolean,
    Choice,
    Custom,
    Integer,
    ListOf,
    Schema,
    Text,
    refuse,
    wrong_type,
)
from facade.translate.flat_tools import flat_tools_of, own_tool
from facade.translate.messages import FUNCTION_NAME, read_base64, unsupported
from facade.translate.options import INT32_MAX, SHARED_FIELDS, Values, options_of
from facade.translate.record import Field, Record, record
from omniserve.llm.v1 import llm_pb2

_CACHED: Final = {"cache_control": "Accepted and without effect: prefixes are reused by themselves."}
_FIELD_NAMES: Final = {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}


def _block(kind: str, *fields: Field, tolerated: Mapping[str, str] = {}) -> Record:
    return record([Field("type", Choice((kind,)), f"Always {kind}.", required=True), *fields], {**_CACHED, **tolerated})


_SOURCE = record(
    [
        Field("type", Choice(("base64",)), "Always base64.", required=True),
        Field("media_type", Choice(("image/jpeg", "image/png", "image/gif", "image/webp")), "Its form.", required=True),
        Field("data", Text(1), "The image in base64.", required=True),
    ]
)


def _read_source(value: object, path: str) -> dict[str, Any]:
    if isinstance(value, dict) and value.get("type") in ("url", "file"):
        unsupported(f"{path}.type", f"'{value['type']}' is not supported; send the image as base64")
    return _SOURCE.read(value, path)


_TEXT = _block("text", Field("text", Text(), "What is said.", required=True), tolerated={"citations": "No effect."})
_IMAGE = _block("image", Field("source", Custom(_read_source, _SOURCE.schema()), "The image.", required=True))
_SAID: Final = {"text": _TEXT, "image": _IMAGE}


def _read_block(blocks: Mapping[str, Record], value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    kind = value.get("type")
    if isinstance(kind, str) and kind in _NOT_HERE:
        unsupported(f"{path}.type", f"'{kind}' is not supported; send its text as a text block")
    return blocks[Choice(tuple(blocks)).read(kind, f"{path}.type")].read(value, path)


_NOT_HERE: Final = frozenset({"document", "search_result", "container_upload", "server_tool_use"})


def _read_blocks(blocks: Mapping[str, Record], value: object, path: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a text or an array of blocks; each block comes with its path."""
    if isinstance(value, str):
        return [(path, {"type": "text", "text": value})]
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of content blocks", value)
    return [
        (place, _read_block(blocks, block, place))
        for place, block in ((f"{path}[{index}]", block) for index, block in enumerate(value))
    ]


def _content_schema(blocks: Mapping[str, Record]) -> Schema:
    several = {"type": "array", "items": {"oneOf": [block.schema() for block in blocks.values()]}}
    return {"oneOf": [{"type": "string"}, several]}


_RESULT = _block(
    "tool_result",
    Field("tool_use_id", Text(1, 256), "The call it answers.", required=True),
    Field(
        "content", Custom(lambda value, path: _read_blocks(_SAID, value, path), _content_schema(_SAID)), "The answer."
    ),
    Field("is_error", Boolean(), "The call failed; the answer says why."),
)
_USE = _block(
    "tool_use",
    Field("id", Text(1, 256), "Identifies the call.", required=True),
    Field("name", Text(1, 256), "The tool.", required=True),
    Field("input", AnyObject(), "Its arguments.", required=True),
    tolerated={"caller": "No effect."},
)
_THINKING = _block(
    "thinking", Field("thinking", Text(), "What it thought.", required=True), tolerated={"signature": "Not checked."}
)
_REDACTED = _block("redacted_thinking", tolerated={"data": "Left out."})
_BY_ROLE: Final = {
    "user": {**_SAID, "tool_result": _RESULT},
    "assistant": {"text": _TEXT, "tool_use": _USE, "thinking": _THINKING, "redacted_thinking": _REDACTED},
}
_TURN = record(
    [
        Field("role", Choice(tuple(_BY_ROLE)), "Who speaks.", required=True),
        Field(
            "content",
            Custom(
                lambda value, _: value, _content_schema({k: v for each in _BY_ROLE.values() for k, v in each.items()})
            ),
            "What is said: a text, or an array of blocks.",
            required=True,
        ),
    ]
)


@dataclass(slots=True)
class _Said:
    """Messages of the contract, each with where it comes from."""

    messages: list[llm_pb2.Message] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def add(self, message: llm_pb2.Message, path: str, parts: Iterable[str] = ()) -> None:
        self.messages.append(message)
        self.places.append(Place(path, tuple(parts)))

    def say(self, role: str, path: str, blocks: Sequence[tuple[str, dict[str, Any]]], **more: Any) -> None:  # noqa: ANN401
        """Add a turn of text and images."""
        message = llm_pb2.Message(role=role, content=[_part(block, place) for place, block in blocks], **more)
        self.add(message, path, [place for place, _ in blocks])


def _part(block: dict[str, Any], path: str) -> llm_pb2.ContentPart:
    if block["type"] == "text":
        return llm_pb2.ContentPart(text=block["text"])
    source = block["source"]
    data = read_base64(source["data"], f"{path}.source.data")
    return llm_pb2.ContentPart(media=llm_pb2.Media(data=data, mime_type=source["media_type"]))


def _read_turn(value: object, path: str) -> _Said:
    turn = _TURN.read(value, path)
    content = f"{path}.content"
    blocks = _read_blocks(_BY_ROLE[turn["role"]], turn["content"], content)
    if not blocks:
        refuse(content, "must have at least 1 item", code="array_below_min_length")
    said = _Said()
    if turn["role"] == "assistant":
        _add_assistant(said, path, blocks)
        return said
    waiting: list[tuple[str, dict[str, Any]]] = []
    for place, block in blocks:
        if block["type"] != "tool_result":
            waiting.append((place, block))
            continue
        if waiting:
            said.say("user", path, waiting)
            waiting = []
        _add_result(said, place, block)
    if waiting:
        said.say("user", path, waiting)
    return said


def _add_result(said: _Said, path: str, block: dict[str, Any]) -> None:
    answer = block.get("content", [])
    if block.get("is_error"):  # the contract's tool turns have no flag for it, and templates have no place
        answer = [(path, {"type": "text", "text": "Error: "}), *answer]
    said.say("tool", path, answer, tool_call_id=block["tool_use_id"])


def _add_assistant(said: _Said, path: str, blocks: Sequence[tuple[str, dict[str, Any]]]) -> None:
    thoughts = [block["thinking"] for _, block in blocks if block["type"] == "thinking"]
    said.say(
        "assistant",
        path,
        [(place, block) for place, block in blocks if block["type"] == "text"],
        tool_calls=[
            llm_pb2.ToolCall(id=block["id"], name=block["name"], arguments_json=orjson.dumps(block["input"]).decode())
            for _, block in blocks
            if block["type"] == "tool_use"
        ],
        reasoning="".join(thoughts) if thoughts else None,
    )


_TOOL = record(
    [
        Field("type", Choice(("custom",)), "Always custom."),
        Field("name", FUNCTION_NAME, "The tool's name.", required=True),
        Field("description", Text(), "What it does; the model reads it."),
        Field("input_schema", AnyObject(), "JSON schema of its arguments.", required=True),
        Field("strict", Boolean(), "Arguments must obey the schema."),
    ],
    {**_CACHED, "eager_input_streaming": "No effect.", "input_examples": "No effect.", "allowed_callers": "No effect."},
)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_CHOICE = record(
    [
        Field("type", Choice((*_CHOICES, "tool")), "auto, any, none, or tool with a name.", required=True),
        Field("name", FUNCTION_NAME, "The tool, for type tool."),
        Field("disable_parallel_tool_use", Boolean(), "At most one call."),
    ]
)
_THINKS = record(
    [Field("type", Choice(("enabled", "disabled", "adaptive")), "Whether the model thinks first.", required=True)],
    {"budget_tokens": "Without effect: max_tokens bounds both.", "display": "Without effect."},
)
_FORMAT = record(
    [
        Field("type", Choice(("json_schema",)), "Always json_schema.", required=True),
        Field("schema", AnyObject(), "The JSON schema.", required=True),
    ]
)
_OUTPUT = record(
    [
        Field("format", _FORMAT, "Constrain the answer to a JSON schema."),
        Field("effort", Choice(("low", "medium", "high", "xhigh", "max")), "Handed to the model's template."),
    ]
)
_SHARED: Final = {each.name: each for each in SHARED_FIELDS}
_ASKED: Final = (
    _SHARED["model"],
    Field(
        "messages",
        ListOf(Custom(_read_turn, _TURN.schema()), fewest=1, most=100_000),
        "The conversation, oldest first. A last assistant turn is continued.",
        required=True,
    ),
    Field(
        "system",
        Custom(lambda value, path: _read_blocks({"text": _TEXT}, value, path), _content_schema({"text": _TEXT})),
        "What the model should know first: a text, or text blocks.",
    ),
    Field("tools", ListOf(own_tool(_TOOL, "custom"), most=128), "Tools that the model may call."),
    Field("tool_choice", _TOOL_CHOICE, "Whether tools are called."),
    Field("thinking", _THINKS, "Whether a reasoning model thinks; absent means the model's default."),
    Field("output_config", _OUTPUT, "The answer's form."),
)
_TOLERATED: Final = dict.fromkeys(
    (
        "cache_control",
        "metadata",
        "service_tier",
        "inference_geo",
        "diagnostics",
        "speed",
        "user_profile_id",
        "workspace_id",
    ),
    "Accepted and without effect here.",
)
MESSAGES = record(
    (
        *_ASKED,
        Field("max_tokens", Integer(1, INT32_MAX), "Most tokens to generate.", required=True),
        Field("stop_sequences", _SHARED["stop"].reader, "Strings that end the text and are not part of it."),
        _SHARED["stream"],
        _SHARED["temperature"],
        _SHARED["top_p"],
        _SHARED["top_k"],
    ),
    _TOLERATED,
)
COUNT_TOKENS = record(_ASKED, _TOLERATED)


def read_messages(body: Mapping[str, Any]) -> Call:
    """Translate a body; DomainError invalid_request or unsupported names the field at fault."""
    values = MESSAGES.read(body, "")
    request, names = _conversation(values)
    options = options_of({"stop": values.get("stop_sequences", ()), **_response_format(values), **values})
    options.limits.max_tokens = values["max_tokens"]
    request.options.CopyFrom(options)
    return Call((request,), request.model, 1, values.get("stream", False), include_usage=False, names=names)


def read_count_tokens(body: Mapping[str, Any]) -> tuple[llm_pb2.TokenizeRequest, Names]:
    """Translate a body; DomainError as read_messages. The names are for errors of llm."""
    request, names = _conversation(COUNT_TOKENS.read(body, ""))
    return llm_pb2.TokenizeRequest(model=request.model, chat=request), names


def _conversation(values: Values) -> tuple[llm_pb2.ChatRequest, Names]:
    said = _Said()
    if "system" in values:
        said.say("system", "system", values["system"])
    for each in values["messages"]:
        said.messages += each.messages
        said.places += each.places
    tools, choice = _tools(values)
    request = llm_pb2.ChatRequest(
        model=values.get("model", ""), messages=said.messages, tools=tools, tool_choice=choice
    )
    thinking, effort = values.get("thinking", {}).get("type"), values.get("output_config", {}).get("effort")
    if thinking in ("enabled", "disabled"):
        request.enable_thinking = thinking == "enabled"
    if effort is not None:
        request.template_variables.update({"reasoning_effort": effort})
    return request, Names(_FIELD_NAMES, tuple(said.places))


def _response_format(values: Values) -> dict[str, Any]:
    wanted = values.get("output_config", {}).get("format")
    if wanted is None:
        return {}
    schema = {"name": "output", "schema": wanted["schema"], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(values: Values) -> tuple[list[llm_pb2.Tool], llm_pb2.ToolChoice | None]:
    choice = values.get("tool_choice", {"type": "auto"})
    if choice["type"] == "tool" and "name" not in choice:
        refuse("tool_choice.name", "is required", code="missing_required_parameter")
    tools = [{**tool, "parameters": tool["input_schema"]} for tool in values.get("tools", ())]
    chosen = _CHOICES.get(choice["type"], {"name": choice.get("name")})
    return flat_tools_of(tools, chosen, parallel=False if choice.get("disable_parallel_tool_use") else None)
