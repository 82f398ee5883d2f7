"""Anthropic's message objects, their stream of events, and the shape of its errors."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from facade.translate.answers import Head, require_ends
from facade.translate.whole import Collected, GainedChoice
from omniserve.llm.v1 import llm_pb2
from services.kit.errors import Reason

_STOPS: Final = {
    llm_pb2.FINISH_REASON_LENGTH: "max_tokens",
    llm_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}
# Of OpenAI's types and ours, where Anthropic is more exact; the others share a name.
_ERROR_TYPES: Final = {
    Reason.NOT_FOUND: "not_found_error",
    Reason.TOO_LARGE: "request_too_large",
    Reason.PAYMENT_REQUIRED: "billing_error",
    Reason.UPSTREAM_TIMEOUT: "timeout_error",
    Reason.DRAINING: "overloaded_error",
    Reason.LOADING: "overloaded_error",
    Reason.NO_CAPACITY: "overloaded_error",
    Reason.ADMISSION_UNAVAILABLE: "overloaded_error",
}


def anthropic_error(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error in Anthropic's shape; `told` is the same in OpenAI's."""
    error = dict(told["error"])
    request_id = error.pop("request_id")
    kind = _ERROR_TYPES.get(Reason(error["reason"]), error["type"])
    error["type"] = "api_error" if kind == "server_error" else kind
    return {"type": "error", "error": error, "request_id": request_id}


def _usage(usages: Iterable[llm_pb2.Usage]) -> dict[str, Any]:
    """Return the counts; Anthropic's input tokens are those that the cache did not have."""
    counted = list(usages)
    cached = sum(usage.cached_tokens for usage in counted)
    return {
        "input_tokens": sum(usage.prompt_tokens for usage in counted) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(usage.completion_tokens for usage in counted),
    }


def _ending(end: llm_pb2.ChoiceDelta) -> dict[str, Any]:
    if end.HasField("stop_string"):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    return {"stop_reason": _STOPS.get(end.finish_reason, "end_turn"), "stop_sequence": None}


def _message(head: Head, content: list[dict[str, Any]], ending: Mapping[str, Any], usage: Mapping[str, Any]) -> Any:  # noqa: ANN401
    message = {"id": head.id, "type": "message", "role": "assistant", "model": head.model, "content": content}
    return {**message, **ending, "usage": usage}


class WholeMessage(Collected):
    """A message sent in one piece."""

    def result(self) -> dict[str, Any]:
        """Return the message."""
        (choice,) = self.choices.values()
        ending = _ending(choice.end if choice.end is not None else llm_pb2.ChoiceDelta())
        message: dict[str, Any] = _message(self.head, _blocks(choice), ending, _usage(self.usages))
        return message


def _blocks(choice: GainedChoice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasonings:
        blocks.append({"type": "thinking", "thinking": "".join(choice.reasonings), "signature": ""})
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    for _, call in sorted(choice.calls.items()):
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _parsed("".join(call.arguments))})
    return blocks


def _parsed(arguments: str) -> Any:  # noqa: ANN401 - JSON
    """Return arguments as the object they are; {} for those that max_tokens cut off."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}


class MessageStream:
    """A message as events: a block opens with its first piece and closes when the next kind of piece comes."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._opened = False
        self._block: object = None
        self._index = -1
        self._before = b""
        self._end: llm_pb2.ChoiceDelta | None = None
        self._usages: list[llm_pb2.Usage] = []

    def output(self, prompt: int, output: llm_pb2.Output) -> bytes:  # noqa: ARG002 - a message has one prompt
        """As Stream.output."""
        return b"".join([self._delta(delta) for delta in output.choices])

    def _delta(self, delta: llm_pb2.ChoiceDelta) -> bytes:
        if delta.finish_reason:
            self._end = delta
        pieces = [self._start()]
        if delta.reasoning:
            thinking = {"type": "thinking", "thinking": "", "signature": ""}
            pieces += self._piece("thinking", thinking, b"thinking_delta", b"thinking", delta.reasoning)
        if delta.text:
            pieces += self._piece("text", {"type": "text", "text": ""}, b"text_delta", b"text", delta.text)
        for call in delta.tool_calls:
            use = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            pieces += self._piece(call.index, use, b"input_json_delta", b"partial_json", call.arguments_json)
        return b"".join(pieces)

    def _start(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        started = _message(self._head, [], {"stop_reason": None, "stop_sequence": None}, _usage(()))
        return _event("message_start", {"message": started})

    def _piece(self, block: object, opening: dict[str, Any], kind: bytes, name: bytes, text: str) -> list[bytes]:
        """Return a piece of a block, after the events that close the one before and open this one."""
        events = []
        if block != self._block:
            events = [self._close(), self._open(block, opening)]
            self._before = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
                % (self._index, kind, name)
            )
        if text:
            events.append(self._before + orjson.dumps(text) + b"}}\n\n")
        return events

    def _open(self, block: object, opening: dict[str, Any]) -> bytes:
        self._block = block
        self._index += 1
        opened = _event("content_block_start", {"index": self._index, "content_block": opening})
        return opened + _event("ping", {}) if self._index == 0 else opened

    def _close(self) -> bytes:
        return _event("content_block_stop", {"index": self._index}) if self._block is not None else b""

    def done(self, prompt: int, done: llm_pb2.Done) -> bytes:  # noqa: ARG002 - a message has one prompt
        """As Stream.done."""
        require_ends(() if self._end is None else (0,), 1)
        self._usages.append(done.usage)
        pieces = [self._start()]
        if self._block is None:  # an answer of nothing has a block too, as the whole one has
            pieces += self._piece("text", {"type": "text", "text": ""}, b"text_delta", b"text", "")
        return b"".join([*pieces, self._close()])

    def end(self) -> bytes:
        """As Stream.end."""
        ending = _ending(self._end if self._end is not None else llm_pb2.ChoiceDelta())
        return _event("message_delta", {"delta": ending, "usage": _usage(self._usages)}) + _event("message_stop", {})

    def failed(self, told: Mapping[str, Any]) -> bytes:
        """As Stream.failed."""
        error = anthropic_error(told)
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"
