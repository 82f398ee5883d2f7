"""What chats and completions share in their answers: finish reasons, token counts, log-probabilities."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omniserve.llm.v1 import llm_pb2
from services.kit.errors import DomainError, Reason

_LEAST_LOGPROB: Final = -9999.0

# OpenAI has no word for a floor on probability: like a stop string, it is a stop that the caller asked for.
_FINISH: Final[Mapping[int, str]] = {
    llm_pb2.FINISH_REASON_STOP: "stop",
    llm_pb2.FINISH_REASON_LENGTH: "length",
    llm_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    llm_pb2.FINISH_REASON_MIN_PROBABILITY: "stop",
}


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with. `created` is in seconds since 1970; `choices` is the number of answers to one prompt."""

    id: str
    created: int
    model: str
    choices: int = 1


def finish_word(reason: int) -> str | None:
    """Return OpenAI's word for a finish reason; None while the choice has not ended."""
    return _FINISH.get(reason)


def require_ends(ended: Collection[int], choices: int) -> None:
    """Raise DomainError engine_failed when the engine says it is done but a choice has no end: that is no whole answer."""
    if len(ended) < choices:
        raise DomainError(
            Reason.ENGINE_FAILED, f"The answer was cut short: {choices - len(ended)} of {choices} choices have no end."
        )


def usage_object(usages: Iterable[llm_pb2.Usage]) -> dict[str, Any]:
    """Return the token counts over all prompts."""
    counted = list(usages)
    prompt = sum(usage.prompt_tokens for usage in counted)
    completion = sum(usage.completion_tokens for usage in counted)
    cached = sum(usage.cached_tokens for usage in counted)
    accepted = sum(usage.accepted_tokens for usage in counted)
    drafted = sum(usage.drafted_tokens for usage in counted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in counted),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "cached_prompt_tokens": cached,
    }


def timings_object(usages: Iterable[llm_pb2.Usage]) -> dict[str, int]:
    """Return how long the slowest prompt waited, was read and was continued, milliseconds."""
    counted = list(usages)
    return {name: max((getattr(usage, name) for usage in counted), default=0) for name in _TIMES}


_TIMES: Final = ("queue_ms", "prefill_ms", "decode_ms")


def chat_logprobs(logprobs: Iterable[llm_pb2.TokenLogprob]) -> dict[str, Any]:
    """Return a chat's log-probabilities."""
    content = [_chat_token(token) | {"top_logprobs": [_chat_token(each) for each in token.top]} for token in logprobs]
    return {"content": content, "refusal": None}


def _chat_token(token: llm_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _finite(logprob: float) -> float:
    """Return a number that JSON has; OpenAI writes this one for a token of hardly any probability."""
    return max(logprob, _LEAST_LOGPROB)


def completion_logprobs(logprobs: Sequence[llm_pb2.TokenLogprob], offset: int) -> dict[str, Any]:
    """Return a completion's log-probabilities; `offset` is where the first token begins in the text, characters.

    The first token of an echoed prompt has none.
    """
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in logprobs],
        "token_logprobs": [None if token.first else _finite(token.logprob) for token in logprobs],
        "top_logprobs": [
            None if token.first else {each.token: _finite(each.logprob) for each in token.top} for token in logprobs
        ],
        "text_offset": offsets,
    }


def tool_call_delta(call: llm_pb2.ToolCallDelta) -> dict[str, Any]:
    """Return a piece of a tool call; id, type and name only in its first piece."""
    function: dict[str, Any] = {"name": call.name} if call.name else {}
    first: dict[str, Any] = {"id": call.id, "type": "function"} if call.id else {}
    return {"index": call.index, **first, "function": function | {"arguments": call.arguments_json}}
