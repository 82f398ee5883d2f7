"""POST /v1/responses: the body, and the call that it becomes once the conversation so far is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from facade.translate.chat import TEMPLATE_FIELDS, Call
from facade.translate.failures import Names
from facade.translate.fields import AnyObject, Boolean, Choice, Custom, Integer, ListOf, Text, refuse, wrong_type
from facade.translate.flat_tools import flat_tools_of, own_tool
from facade.translate.messages import FUNCTION_NAME, unsupported
from facade.translate.options import INT32_MAX, SAMPLING_FIELDS, SHARED_FIELDS, options_of
from facade.translate.record import Field, record
from facade.translate.response_items import INPUT_SCHEMA, Conversation, Item, read_input
from omniserve.llm.v1 import llm_pb2

_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_MOST_PAIRS: Final = 16
_NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "template_variables": "reasoning",
}


def _read_metadata(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        wrong_type(path, "an object of strings", value)
    if len(value) > _MOST_PAIRS:
        refuse(path, f"must have at most {_MOST_PAIRS} entries, not {len(value)}")
    for name in value:
        Text(1, 64).read(name, f"{path}.{name[:64]}")
    return {name: Text(0, 512).read(item, f"{path}.{name}") for name, item in value.items()}


_TOOL = record(
    [
        Field("type", Choice(("function",)), "Always function.", required=True),
        Field("name", FUNCTION_NAME, "The function's name.", required=True),
        Field("description", Text(), "What it does; the model reads it."),
        Field("parameters", AnyObject(), "JSON schema of its arguments; absent means none."),
        Field("strict", Boolean(), "Arguments must obey the schema; absent means no."),
    ],
    {"defer_loading": "No effect.", "output_schema": "No effect.", "allowed_callers": "No effect."},
)
_NAMED = record(
    [Field("type", Choice(("function",)), "", required=True), Field("name", FUNCTION_NAME, "", required=True)]
)
_ALLOWED = record(
    [
        Field("type", Choice(("allowed_tools",)), "", required=True),
        Field("mode", Choice(("auto", "required")), "Whether one must be called.", required=True),
        Field("tools", ListOf(_NAMED, fewest=1, most=128), "Those that may be called.", required=True),
    ]
)
_WORDS: Final = ("auto", "none", "required")


def _read_choice(value: object, path: str) -> str | dict[str, Any]:
    if isinstance(value, str):
        return Choice(_WORDS).read(value, path)
    if not isinstance(value, dict):
        wrong_type(path, "a string or an object", value)
    kind = value.get("type")
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        unsupported(f"{path}.type", f"'{kind[:60]}' is not supported; 'function' and 'allowed_tools' are")
    return (_ALLOWED if kind == "allowed_tools" else _NAMED).read(value, path)


_FORMAT = record(
    [
        Field("type", Choice(("text", "json_object", "json_schema")), "What to obey.", required=True),
        Field("name", Text(1, 64, r"[a-zA-Z0-9_-]+"), "The format's name, for type json_schema."),
        Field("schema", AnyObject(), "The schema, for type json_schema."),
        Field("description", Text(), "No effect."),
        Field("strict", Boolean(), "Refuse a schema that cannot be enforced in full instead of loosening it."),
    ]
)
_TEXT = record([Field("format", _FORMAT, "Constrain the answer.")], {"verbosity": "Without effect."})
_EFFORT = next(field for field in TEMPLATE_FIELDS if field.name == "reasoning_effort")
_REASONING = record(
    [Field("effort", _EFFORT.reader, _EFFORT.sentence)],
    dict.fromkeys(("summary", "generate_summary", "context", "mode"), "Without effect: thoughts are told as they are."),
)


def _read_background(value: object, path: str) -> bool:
    if Boolean().read(value, path):
        unsupported(path, "is not supported: an answer is made while its request waits, or as a stream")
    return False


_MODEL = SHARED_FIELDS[0]
RESPONSE = record(
    (
        _MODEL,
        Field(
            "input", Custom(read_input, INPUT_SCHEMA), "What to answer: a text, or an array of items.", required=True
        ),
        Field("instructions", Text(), "What the model should know first; not kept for the next response."),
        Field("previous_response_id", Text(1, 128), "A stored response whose conversation goes on."),
        Field("max_output_tokens", Integer(1, INT32_MAX), "Most tokens to generate; absent means what fits."),
        *SAMPLING_FIELDS,
        Field("top_logprobs", Integer(0, 20), f"Alternatives per token; needs {_LOGPROBS} in include."),
        Field("include", ListOf(Choice(_INCLUDES), most=20), f"{_LOGPROBS}; the others have no effect."),
        Field("tools", ListOf(own_tool(_TOOL, "function"), most=128), "Functions that the model may call."),
        Field(
            "tool_choice",
            Custom(
                _read_choice,
                {"oneOf": [{"type": "string", "enum": list(_WORDS)}, _NAMED.schema(), _ALLOWED.schema()]},
            ),
            "Whether functions are called: none, auto, required, or a named one.",
        ),
        Field("parallel_tool_calls", Boolean(), "Whether several functions may be called at once; absent means yes."),
        Field("text", _TEXT, "The answer's form."),
        Field("reasoning", _REASONING, "How a reasoning model thinks."),
        Field("enable_thinking", Boolean(), "Whether a reasoning model thinks; absent means the model's default."),
        Field("store", Boolean(), "Keep the response for a while; absent means yes."),
        Field(
            "metadata", Custom(_read_metadata, {"type": "object", "additionalProperties": {"type": "string"}}), "Kept."
        ),
        Field("stream", Boolean(), "Send the answer as server-sent events while it is made."),
        Field(
            "stream_options",
            record([], {"include_obfuscation": "Without effect.", "include_usage": "Without effect."}),
            "Only with stream.",
        ),
        Field(
            "truncation",
            Choice(("auto", "disabled")),
            "What happens to a conversation that is too long: auto leaves out its oldest turns, disabled refuses it.",
        ),
        Field("background", Custom(_read_background, {"const": False}), "Only false."),
    ),
    dict.fromkeys(
        (
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "service_tier",
            "max_tool_calls",
            "moderation",
        ),
        "Accepted and without effect here.",
    ),
)
_REFUSED: Final = {
    "conversation": "is not supported; use 'previous_response_id'",
    "prompt": "is not supported; send 'instructions' and 'input'",
    "context_management": "is not supported",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked body. `items`: its input, not all with ids; `values`: its other fields that are there."""

    items: tuple[Item, ...]
    values: Mapping[str, Any]

    @property
    def previous(self) -> str | None:
        """The response that this one follows."""
        return self.values.get("previous_response_id")

    @property
    def store(self) -> bool:
        """Whether the response is kept."""
        return bool(self.values.get("store", True))

    @property
    def stream(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.values.get("stream", False))


def read_response(body: Mapping[str, Any]) -> tuple[Asked, Call]:
    """Check a body; return it and the call it is when it follows nothing.

    DomainError invalid_request or unsupported names the field at fault.
    """
    for name, message in _REFUSED.items():
        if body.get(name) is not None:
            unsupported(name, message)
    values = RESPONSE.read({name: value for name, value in body.items() if name not in _REFUSED}, "")
    if values.get("top_logprobs") and _LOGPROBS not in values.get("include", ()):
        refuse("top_logprobs", f"needs '{_LOGPROBS}' in 'include'")
    if "stream_options" in values and not values.get("stream"):
        refuse("stream_options", "is only allowed when 'stream' is true")
    asked = Asked(tuple(values.pop("input")), values)
    return asked, call_of(asked, ())


def call_of(asked: Asked, past: Sequence[Item]) -> Call:
    """Return the call for a body that follows past items; DomainError as read_response."""
    values = asked.values
    talk = Conversation()
    if "instructions" in values:
        talk.instruct(values["instructions"])
    talk.add(past, lambda _: "previous_response_id")
    talk.add(asked.items, lambda index: f"input[{index}]")
    tools, choice = flat_tools_of(
        values.get("tools", ()), values.get("tool_choice", "auto"), parallel=values.get("parallel_tool_calls")
    )
    request = llm_pb2.ChatRequest(
        model=values.get("model", ""),
        messages=talk.messages,
        tools=tools,
        tool_choice=choice,
        drop_oldest=values.get("truncation") == "auto",
    )
    effort, thinking = values.get("reasoning", {}).get("effort"), values.get("enable_thinking")
    if effort is not None:
        request.template_variables.update({"reasoning_effort": effort})
        thinking = False if effort == "none" and thinking is None else thinking
    if thinking is not None:
        request.enable_thinking = thinking
    options = options_of({name: values[name] for name in _SAMPLING if name in values} | _response_format(values))
    if "max_output_tokens" in values:
        options.limits.max_tokens = values["max_output_tokens"]
    options.logprobs = _LOGPROBS in values.get("include", ())
    options.top_logprobs = values.get("top_logprobs", 0)
    request.options.CopyFrom(options)
    names = Names(_NAMES, tuple(talk.places))
    return Call((request,), request.model, 1, asked.stream, include_usage=False, names=names)


_SAMPLING: Final = tuple(field.name for field in SAMPLING_FIELDS)


def _response_format(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return text.format in the nesting that chats have."""
    wanted = values.get("text", {}).get("format", {"type": "text"})
    kind = wanted["type"]
    if kind != "json_schema":
        for name in ("name", "schema"):
            if name in wanted:
                refuse(f"text.format.{name}", f"is only allowed with type json_schema, not {kind}")
        return {"response_format": {"type": kind}}
    for name in ("name", "schema"):
        if name not in wanted:
            refuse(f"text.format.{name}", "is required", code="missing_required_parameter")
    schema = {name: wanted[name] for name in ("name", "schema", "strict") if name in wanted}
    return {"response_format": {"type": kind, "json_schema": schema}}
