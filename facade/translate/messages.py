"""The conversation: OpenAI's messages become the contract's."""

import base64
import binascii
from typing import Any, NoReturn

from facade.translate.fields import Choice, Custom, Integer, ListOf, Schema, Text, refuse, wrong_type
from facade.translate.record import Field, Record, record
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import Reason

_MAX_MESSAGES = 100_000
_AUDIO_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg"}
FUNCTION_NAME = Text(1, 64, r"[a-zA-Z0-9_-]+")

_TEXT_PART = record(
    [
        Field("type", Choice(("text",)), "Always text.", required=True),
        Field("text", Text(), "What is said.", required=True),
    ]
)
_REFUSAL_PART = record(
    [Field("type", Choice(("refusal",)), "Always refusal.", required=True), Field("refusal", Text(), "", required=True)]
)
_IMAGE_URL = record(
    [Field("url", Text(1), "A data: URL with the image in base64.", required=True)],
    {"detail": "Accepted and without effect here."},
)
_IMAGE_PART = record(
    [
        Field("type", Choice(("image_url",)), "Always image_url.", required=True),
        Field("image_url", _IMAGE_URL, "The image.", required=True),
    ]
)
_AUDIO = record(
    [
        Field("data", Text(1), "The sound in base64.", required=True),
        Field("format", Choice(tuple(_AUDIO_TYPES)), "How it is encoded.", required=True),
    ]
)
_AUDIO_PART = record(
    [
        Field("type", Choice(("input_audio",)), "Always input_audio.", required=True),
        Field("input_audio", _AUDIO, "The sound.", required=True),
    ]
)
_PARTS: dict[str, Record] = {
    "text": _TEXT_PART,
    "refusal": _REFUSAL_PART,
    "image_url": _IMAGE_PART,
    "input_audio": _AUDIO_PART,
}


def unsupported(path: str, message: str) -> NoReturn:
    """Refuse something that OpenAI knows and this mesh does not."""
    refuse(path, message, code="unsupported_value", reason=Reason.UNSUPPORTED)


def read_content(value: object, path: str) -> list[llm_pb2.ContentPart]:
    """Read a text, or an array of parts; an empty text is no part at all."""
    if isinstance(value, str):
        return [llm_pb2.ContentPart(text=value)]
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of content parts", value)
    if not value:
        refuse(path, "must have at least 1 item", code="array_below_min_length")
    return [_read_part(part, f"{path}[{index}]") for index, part in enumerate(value)]


def _read_part(value: object, path: str) -> llm_pb2.ContentPart:
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    if value.get("type") == "file":
        unsupported(f"{path}.type", "'file' is not supported; send its text as a text part")
    kind = Choice(tuple(_PARTS)).read(value.get("type"), f"{path}.type")
    part = _PARTS[kind].read({key: item for key, item in value.items() if key != "prompt_cache_breakpoint"}, path)
    if kind == "image_url":
        return llm_pb2.ContentPart(media=read_image(part["image_url"]["url"], f"{path}.image_url.url"))
    if kind == "input_audio":
        audio = part["input_audio"]
        data = read_base64(audio["data"], f"{path}.input_audio.data")
        return llm_pb2.ContentPart(media=llm_pb2.Media(data=data, mime_type=_AUDIO_TYPES[audio["format"]]))
    return llm_pb2.ContentPart(text=part[kind])


def read_image(url: str, path: str) -> llm_pb2.Media:
    """Return the image of a data: URL."""
    head, comma, data = url.partition(",")
    scheme, colon, rest = head.partition(":")
    if scheme.lower() != "data" or not colon:
        unsupported(path, f"must be a data: URL with the image in base64; '{scheme[:20]}:' addresses are not fetched")
    mime_type, _, encoding = rest.rpartition(";")
    if not comma or encoding.lower() != "base64" or not mime_type.lower().startswith("image/"):
        refuse(path, "must look like data:image/<type>;base64,<data>")
    return llm_pb2.Media(data=read_base64(data, path), mime_type=mime_type.lower())


def read_base64(data: str, path: str) -> bytes:
    """Return what base64 stands for."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        refuse(path, f"is not valid base64: {error}")
    if not decoded:
        refuse(path, "must not be empty")
    return decoded


_CALLED_FUNCTION = record(
    [
        Field("name", Text(1, 256), "The function's name.", required=True),
        Field("arguments", Text(), "Its arguments as JSON text.", required=True),
    ]
)
_TOOL_CALL = record(
    [
        Field("id", Text(1, 256), "Identifies the call.", required=True),
        Field("type", Choice(("function",)), "Always function."),
        Field("function", _CALLED_FUNCTION, "The function called.", required=True),
    ],
    {"index": "Left over from a stream; without effect."},
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_CONTENT_SCHEMA: Schema = {
    "description": "A text, or an array of parts.",
    "oneOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"oneOf": [part.schema() for part in _PARTS.values()]}},
    ],
}
_ROLE = Field("role", Choice(ROLES), "Who speaks.", required=True)
_CONTENT = Field("content", Custom(read_content, _CONTENT_SCHEMA), "What is said.")
_NAME = Field("name", Text(0, 256), "The speaker's name.")
_SPOKEN = record([_ROLE, _CONTENT, _NAME])
_ANSWERED = record([_ROLE, _CONTENT, _NAME, Field("tool_call_id", Text(1, 256), "The call it answers.", required=True)])
# An answer of ours sent back as it was received must be welcome, so its optional members are known here.
_ASSISTANT = record(
    [
        _ROLE,
        _CONTENT,
        _NAME,
        Field("tool_calls", ListOf(_TOOL_CALL, most=128), "Functions it called."),
        Field("refusal", Text(), "What it said instead of an answer."),
        Field("reasoning_content", Text(), "What it thought before it answered."),
        Field("function_call", Custom(lambda _, path: unsupported(path, "is not supported; use 'tool_calls'"), {}), ""),
        Field("audio", Custom(lambda _, path: unsupported(path, "is not supported"), {}), "Not supported."),
    ],
    {"annotations": "Without effect.", "weight": "Without effect."},
)
_BY_ROLE = {"assistant": _ASSISTANT, "tool": _ANSWERED}


def read_message(value: object, path: str) -> llm_pb2.Message:
    """Read one turn of a conversation."""
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    if value.get("role") is None:
        refuse(f"{path}.role", "is required", code="missing_required_parameter")
    if value["role"] == "function":
        unsupported(f"{path}.role", "'function' is not supported; answer with role 'tool'")
    role = _ROLE.reader.read(value["role"], f"{path}.role")
    turn = _BY_ROLE.get(role, _SPOKEN).read(value, path)
    content = turn.get("content") or _instead_of_content(turn, path)
    return llm_pb2.Message(
        role=role,
        content=content,
        name=turn.get("name"),
        tool_calls=[_tool_call(call) for call in turn.get("tool_calls", ())],
        tool_call_id=turn.get("tool_call_id"),
        reasoning=turn.get("reasoning_content"),
    )


def _instead_of_content(turn: dict[str, Any], path: str) -> list[llm_pb2.ContentPart]:
    if "refusal" in turn:
        return [llm_pb2.ContentPart(text=turn["refusal"])]
    if not turn.get("tool_calls"):
        refuse(f"{path}.content", "is required", code="missing_required_parameter")
    return []


def _tool_call(call: dict[str, Any]) -> llm_pb2.ToolCall:
    function = call["function"]
    return llm_pb2.ToolCall(id=call["id"], name=function["name"], arguments_json=function["arguments"])


def _message_schema() -> Schema:
    """Return the three forms of a message, told apart by their roles."""
    refused = {"function_call", "audio"}
    forms = []
    for kind, roles in ((_SPOKEN, ROLES[:3]), (_ASSISTANT, ("assistant",)), (_ANSWERED, ("tool",))):
        fields = [field for name, field in kind.fields.items() if name not in {"role", *refused}]
        schema = record([Field("role", Choice(roles), "Who speaks.", required=True), *fields], kind.tolerated).schema()
        if kind is not _ASSISTANT:
            schema["required"].append("content")
        forms.append(schema)
    return {"oneOf": forms}


MESSAGES = Field(
    "messages",
    ListOf(Custom(read_message, _message_schema()), fewest=1, most=_MAX_MESSAGES),
    "The conversation, oldest first. A last assistant turn is continued.",
    required=True,
)
TOKEN = Integer(0, 2**31 - 1)
