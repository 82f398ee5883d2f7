"""What a chat stream says, read from its server-sent events. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from cli.errors import CliError
from cli.http import describe_error
from cli.sse import SseComment, SseEvent
from cli.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

DONE = "[DONE]"
# First words of the comments that tell what a request waits for; any other comment only keeps the connection open.
_PROGRESS = ("queued", "loading", "prefill")


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what a reasoning model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Waiting:
    """The request has not begun to answer yet; `what` says why, in a few words."""

    what: str


ChatEvent: TypeAlias = Text | Reasoning | Waiting


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer, as the mesh reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass
class ChatReader:
    """Reads one answer. Feed it every item of the stream, then `finish` it: only then is the answer known to be whole."""

    usage: Usage | None = None
    finish_reason: str | None = None
    text: str = ""
    _done: bool = field(default=False)

    def read(self, item: SseEvent | SseComment) -> list[ChatEvent]:
        """Return what the item tells. Raises CliError for an error event and for data that is no chunk."""
        if isinstance(item, SseComment):
            return [Waiting(one_line(item.text))] if item.text.startswith(_PROGRESS) else []
        if item.data == DONE:
            self._done = True
            return []
        chunk = _object(item.data)
        error = chunk.get("error")
        if isinstance(error, dict) or item.event == "error":
            raise CliError(describe_error(error if isinstance(error, dict) else chunk))
        self._count(chunk.get("usage"))
        return [event for choice in _objects(chunk.get("choices")) for event in self._choice(choice)]

    def finish(self) -> None:
        """Raise CliError when the stream ended without its closing mark: the answer was cut short."""
        if not self._done:
            raise CliError(
                "the answer was cut short: the connection ended before the stream was closed [stream_broken]"
            )

    def _choice(self, choice: Mapping[str, Any]) -> list[ChatEvent]:
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        events: list[ChatEvent] = []
        if isinstance(reasoning := delta.get("reasoning_content"), str) and reasoning:
            events.append(Reasoning(reasoning))
        if isinstance(content := delta.get("content"), str) and content:
            self.text += content
            events.append(Text(content))
        return events

    def _count(self, usage: object) -> None:
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else 0
            self.usage = Usage(
                _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached)
            )


def _object(data: str) -> Mapping[str, Any]:
    try:
        decoded = json.loads(data)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise CliError(f"the mesh sent an event that is no chat chunk: {one_line(data, limit=120)}")
    return decoded


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
