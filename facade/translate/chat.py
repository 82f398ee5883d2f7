"""POST /v1/chat/completions: the body becomes a ChatRequest."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from facade.translate.failures import CHAT_NAMES, OWN_NAMES, Names
from facade.translate.fields import AnyObject, Boolean, Choice, Custom, Integer, refuse
from facade.translate.messages import MESSAGES, unsupported
from facade.translate.options import INT32_MAX, SHARED_FIELDS, WITHOUT_EFFECT, Values, options_of, schema_place
from facade.translate.record import Field, record
from facade.translate.tools import TOOL_FIELDS, tools_of
from omniserve.llm.v1 import llm_pb2

_MAX_TEMPLATE_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Call:
    """What a request asks for: one contract request for each prompt, and how to answer.

    `model` is the name as asked, "" for the default. `choices` counts the answers to one prompt. `names` tell errors what
    the caller calls the contract's fields.
    """

    requests: tuple[llm_pb2.ChatRequest | llm_pb2.CompleteRequest, ...]
    model: str
    choices: int
    stream: bool
    include_usage: bool
    names: Names = OWN_NAMES


def _unsupported(message: str) -> Custom:
    return Custom(lambda _, path: unsupported(path, message), {"description": "Refused."})


def _read_modalities(value: object, path: str) -> object:
    if value != ["text"]:
        unsupported(path, 'must be ["text"]')
    return value


TEMPLATE_FIELDS = (
    Field("enable_thinking", Boolean(), "Whether a reasoning model thinks; absent means the model's default."),
    Field("chat_template_kwargs", AnyObject(_MAX_TEMPLATE_DEPTH), "Extra variables for the model's chat template."),
    Field(
        "reasoning_effort",
        Choice(("none", "minimal", "low", "medium", "high", "xhigh")),
        "Handed to the model's template; none turns thinking off.",
    ),
)
CHAT = record(
    (
        MESSAGES,
        *SHARED_FIELDS,
        Field("max_completion_tokens", Integer(1, INT32_MAX), "Most tokens to generate; absent means what fits."),
        Field("max_tokens", Integer(1, INT32_MAX), "Older name of max_completion_tokens."),
        Field("logprobs", Boolean(), "Report the log-probability of each token."),
        Field("top_logprobs", Integer(0, 20), "Alternatives per token; needs logprobs."),
        *TOOL_FIELDS,
        *TEMPLATE_FIELDS,
        Field(
            "continue_final_message",
            Boolean(),
            "Says that the last message, an assistant's, is continued, as it always is.",
        ),
        Field("add_generation_prompt", Boolean(), "Says that a new answer begins, as it does unless one is continued."),
        Field("modalities", Custom(_read_modalities, {"const": ["text"]}), "Only text."),
    ),
    WITHOUT_EFFECT,
)
# Known to OpenAI and not to this mesh: refused by name and kept out of the published description.
_REFUSED = {
    "functions": "is not supported; use 'tools'",
    "function_call": "is not supported; use 'tool_choice'",
    "audio": "is not supported",
    "web_search_options": "is not supported",
    "moderation": "is not supported",
}
_CHAT = record(
    (*CHAT.fields.values(), *(Field(name, _unsupported(message), "") for name, message in _REFUSED.items())),
    WITHOUT_EFFECT,
)


def read_chat(body: Mapping[str, Any]) -> Call:
    """Translate a body; DomainError invalid_request or unsupported names the field at fault."""
    values = _CHAT.read(body, "")
    request = conversation_of(values)
    _check_end(values, request.messages[-1])
    options = options_of(values)
    max_tokens = _max_tokens(values)
    if max_tokens is not None:
        options.limits.max_tokens = max_tokens
    options.logprobs = values.get("logprobs", False)
    options.top_logprobs = values.get("top_logprobs", 0)
    if options.top_logprobs and not options.logprobs:
        refuse("top_logprobs", "is only allowed when 'logprobs' is true")
    request.options.CopyFrom(options)
    return Call(
        requests=(request,),
        model=request.model,
        choices=values.get("n", 1),
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        names=replace(CHAT_NAMES, schema=schema_place(values)),
    )


def conversation_of(values: Values) -> llm_pb2.ChatRequest:
    """Translate what shapes the prompt: messages, tools and template variables."""
    tools, tool_choice = tools_of(values)
    request = llm_pb2.ChatRequest(
        model=values.get("model", ""), messages=values["messages"], tools=tools, tool_choice=tool_choice
    )
    variables = dict(values.get("chat_template_kwargs", {}))
    effort, thinking = values.get("reasoning_effort"), values.get("enable_thinking", variables.get("enable_thinking"))
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        thinking = False if effort == "none" and thinking is None else thinking
    if isinstance(thinking, bool):
        request.enable_thinking = thinking
    if variables:
        request.template_variables.update(variables)
    return request


def _check_end(values: Values, last: llm_pb2.Message) -> None:
    """Refuse what a caller says about the end of the prompt if it is not how the prompt will end.

    The two names are those of vLLM and of Hugging Face's chat templates.
    """
    continues = last.role == "assistant" and not last.tool_calls
    if values.get("continue_final_message") and values.get("add_generation_prompt"):
        refuse("continue_final_message", "cannot be true when 'add_generation_prompt' is")
    if values.get("continue_final_message", continues) != continues:
        end = "the last message is an assistant's, and those are" if continues else "only an assistant's text can be"
        unsupported("continue_final_message", f"cannot be {str(not continues).lower()} here: {end} continued")
    if values.get("add_generation_prompt", not continues) == continues:
        end = "is continued" if continues else "needs an answer"
        unsupported("add_generation_prompt", f"cannot be {str(continues).lower()} here: the last message {end}")


def _max_tokens(values: Values) -> int | None:
    newer, older = values.get("max_completion_tokens"), values.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        refuse("max_tokens", f"is {older} while 'max_completion_tokens' is {newer}; give one of them")
    limit: int | None = newer if newer is not None else older
    return limit
