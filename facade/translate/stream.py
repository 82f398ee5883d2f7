"""Streamed answers: events in, server-sent events out, as bytes.

This is the hot path: one call for each step of the engine. What does not change within an answer is encoded once.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from facade.translate.answers import (
    Head,
    chat_logprobs,
    completion_logprobs,
    finish_word,
    require_ends,
    timings_object,
    tool_call_delta,
    usage_object,
)
from omniserve.llm.v1 import llm_pb2

DONE = b"data: [DONE]\n\n"


class Stream(Protocol):
    """One streamed answer to one or several prompts. `prompt` is a prompt's place in the request."""

    def output(self, prompt: int, output: llm_pb2.Output) -> bytes:
        """Return the events for what a prompt's choices gained."""

    def done(self, prompt: int, done: llm_pb2.Done) -> bytes:
        """Return the events that end a prompt's choices. A finish reason is told only now: the answer is whole.

        Raises DomainError engine_failed when a choice has no end.
        """

    def end(self) -> bytes:
        """Return the events that end the answer."""

    def failed(self, told: Mapping[str, Any]) -> bytes:
        """Return the events that end an answer which broke; `told` is the error in OpenAI's shape."""


class _Frame:
    """The bytes around each chunk of one answer, and its end."""

    def __init__(self, head: Head, kind: str, *, include_usage: bool) -> None:
        opening = orjson.dumps({"id": head.id, "object": kind, "created": head.created, "model": head.model})
        self.before = b"data: " + opening[:-1] + b',"choices":[{"index":'
        self.after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._opening = opening
        self._include_usage = include_usage
        self._usages: list[llm_pb2.Usage] = []

    @staticmethod
    def failed(told: Mapping[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(told) + b"\n\n"

    def count(self, done: llm_pb2.Done) -> None:
        self._usages.append(done.usage)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        counts = {"usage": usage_object(self._usages), "omniserve": timings_object(self._usages)}
        return b"data: " + self._opening[:-1] + b',"choices":[],' + orjson.dumps(counts)[1:] + b"\n\n" + DONE


class ChatStream:
    """A chat as chunks: the role first, then content, reasoning and tool calls, the finish reason last."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        self._frame = _Frame(head, "chat.completion.chunk", include_usage=include_usage)
        self._choices_asked = head.choices
        self._choices: dict[int, _ChatChoice] = {}
        self._finishes: dict[int, str] = {}

    def output(self, prompt: int, output: llm_pb2.Output) -> bytes:  # noqa: ARG002 - a chat has one prompt
        """As Stream.output."""
        return b"".join([self._delta(delta) for delta in output.choices])

    def _delta(self, delta: llm_pb2.ChoiceDelta) -> bytes:
        choice = self._choices.get(delta.index)
        opening = b""
        if choice is None:
            choice = self._choices[delta.index] = _ChatChoice(self._frame, delta.index)
            opening = choice.opening
        finish = finish_word(delta.finish_reason)
        if finish is not None:
            self._finishes[delta.index] = finish
        if delta.reasoning or delta.tool_calls or delta.logprobs:
            return opening + choice.rich(delta)
        return opening + choice.text(delta.text) if delta.text else opening

    def done(self, prompt: int, done: llm_pb2.Done) -> bytes:  # noqa: ARG002 - a chat has one prompt
        """As Stream.done."""
        require_ends(self._finishes, self._choices_asked)
        self._frame.count(done)
        return b"".join([self._choices[index].finish(word) for index, word in sorted(self._finishes.items())])

    def end(self) -> bytes:
        """As Stream.end."""
        return self._frame.end()

    def failed(self, told: Mapping[str, Any]) -> bytes:
        """As Stream.failed."""
        return self._frame.failed(told)


class _ChatChoice:
    """The encoded bytes around one choice's pieces."""

    def __init__(self, frame: _Frame, index: int) -> None:
        self._start = frame.before + str(index).encode()
        self._end = b',"logprobs":null,"finish_reason":null' + frame.after
        self._after = frame.after
        self._before_text = self._start + b',"delta":{"content":'
        self._after_text = b"}" + self._end
        self.opening = self._start + b',"delta":{"role":"assistant","content":"","refusal":null}' + self._end

    def text(self, text: str) -> bytes:
        return self._before_text + orjson.dumps(text) + self._after_text

    def rich(self, delta: llm_pb2.ChoiceDelta) -> bytes:
        gained: dict[str, Any] = {}
        if delta.reasoning:
            gained["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            gained["tool_calls"] = [tool_call_delta(call) for call in delta.tool_calls]
        if delta.text:
            gained["content"] = delta.text
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        piece = orjson.dumps({"delta": gained, "logprobs": logprobs, "finish_reason": None})
        return self._start + b"," + piece[1:-1] + self._after

    def finish(self, word: str) -> bytes:
        return self._start + b',"delta":{},"logprobs":null,"finish_reason":' + orjson.dumps(word) + self._after


class CompletionStream:
    """Completions as chunks; the choices of a later prompt are numbered on from those of the earlier ones."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        self._frame = _Frame(head, "text_completion", include_usage=include_usage)
        self._choices_of_one = head.choices
        self._offsets: dict[int, int] = {}
        self._finishes: dict[int, dict[int, str]] = {}

    def output(self, prompt: int, output: llm_pb2.Output) -> bytes:
        """As Stream.output."""
        return b"".join([self._delta(prompt, delta) for delta in output.choices])

    def _delta(self, prompt: int, delta: llm_pb2.ChoiceDelta) -> bytes:
        index = prompt * self._choices_of_one + delta.index
        finish = finish_word(delta.finish_reason)
        if finish is not None:
            self._finishes.setdefault(prompt, {})[index] = finish
        if not delta.text and not delta.logprobs:
            return b""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(delta.text)
        logprobs = orjson.dumps(completion_logprobs(delta.logprobs, offset)) if delta.logprobs else b"null"
        return self._chunk(index, delta.text, logprobs, b"null")

    def _chunk(self, index: int, text: str, logprobs: bytes, finish: bytes) -> bytes:
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._frame.before,
            index,
            orjson.dumps(text),
            logprobs,
            finish,
            self._frame.after,
        )

    def done(self, prompt: int, done: llm_pb2.Done) -> bytes:
        """As Stream.done."""
        finishes = self._finishes.pop(prompt, {})
        require_ends(finishes, self._choices_of_one)
        self._frame.count(done)
        return b"".join([self._chunk(index, "", b"null", orjson.dumps(finishes[index])) for index in sorted(finishes)])

    def end(self) -> bytes:
        """As Stream.end."""
        return self._frame.end()

    def failed(self, told: Mapping[str, Any]) -> bytes:
        """As Stream.failed."""
        return self._frame.failed(told)
