"""Answers that are sent in one piece: events are collected, then told as one object."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from facade.translate.answers import (
    Head,
    chat_logprobs,
    completion_logprobs,
    finish_word,
    require_ends,
    timings_object,
    usage_object,
)
from omniserve.llm.v1 import llm_pb2


class Whole(Protocol):
    """One answer being collected. `prompt` is a prompt's place in the request."""

    def output(self, prompt: int, output: llm_pb2.Output) -> None:
        """Take what a prompt's choices gained."""

    def done(self, prompt: int, done: llm_pb2.Done) -> None:
        """Take the end of a prompt. Raises DomainError engine_failed when one of its choices has no end."""

    def result(self) -> dict[str, Any]:
        """Return the answer."""


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GainedChoice:
    """What one choice has gained so far. `end`: its last delta, once that is there."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[llm_pb2.TokenLogprob] = field(default_factory=list)
    before_logprobs: int | None = None
    tokens: int = 0
    end: llm_pb2.ChoiceDelta | None = None

    def take(self, delta: llm_pb2.ChoiceDelta) -> None:
        """Add what was gained."""
        if delta.logprobs and self.before_logprobs is None:  # an echoed prompt comes without any
            self.before_logprobs = sum(len(text) for text in self.texts)
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.reasoning:
            self.reasonings.append(delta.reasoning)
        for piece in delta.tool_calls:
            call = self.calls.setdefault(piece.index, _Call())
            call.id, call.name = call.id or piece.id, call.name or piece.name
            call.arguments.append(piece.arguments_json)
        self.tokens += delta.tokens
        if delta.finish_reason:
            self.end = delta

    @property
    def finish(self) -> str | None:
        """OpenAI's word for how it ended; None while it has not."""
        return finish_word(self.end.finish_reason) if self.end is not None else None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)


class Collected:
    """The choices of all prompts and their counts."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.choices: dict[int, GainedChoice] = {}
        self.usages: list[llm_pb2.Usage] = []

    def output(self, prompt: int, output: llm_pb2.Output) -> None:
        """As Whole.output."""
        for delta in output.choices:
            index = prompt * self.head.choices + delta.index
            self.choices.setdefault(index, GainedChoice()).take(delta)

    def done(self, prompt: int, done: llm_pb2.Done) -> None:
        """As Whole.done."""
        first = prompt * self.head.choices
        mine = range(first, first + self.head.choices)
        require_ends([index for index in mine if index in self.choices and self.choices[index].finish], len(mine))
        self.usages.append(done.usage)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.head.id,
            "object": kind,
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
            "usage": usage_object(self.usages),
            "omniserve": timings_object(self.usages),
        }


class WholeChat(Collected):
    """A chat's answer."""

    def result(self) -> dict[str, Any]:
        """As Whole.result."""
        choices = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": chat_logprobs(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish,
            }
            for index, choice in sorted(self.choices.items())
        ]
        return self._object("chat.completion", choices)


def _message(choice: GainedChoice) -> dict[str, Any]:
    text = choice.text
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not choice.calls else None}
    message["refusal"] = None
    if choice.reasonings:
        message["reasoning_content"] = "".join(choice.reasonings)
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for _, call in sorted(choice.calls.items())
        ]
    return message


class WholeCompletion(Collected):
    """A completion's answer."""

    def result(self) -> dict[str, Any]:
        """As Whole.result."""
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": completion_logprobs(choice.logprobs, choice.before_logprobs or 0)
                if choice.logprobs
                else None,
                "finish_reason": choice.finish,
            }
            for index, choice in sorted(self.choices.items())
        ]
        return self._object("text_completion", choices)
