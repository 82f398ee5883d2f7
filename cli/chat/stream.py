"""What a chat stream says, read from its server-sent events. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cli.errors import CliError
from cli.http import describe_error
from cli.sse import SseComment, SseEvent
from cli.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DONE = "[DONE]"
# Comments that tell what a request waits for, and how that reads; any other comment only keeps the connection open.
_PROGRESS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"queued (\d+)"), lambda match: f"queued, place {match[1]}"),
    (re.compile(r"loading (\d\.\d+)"), lambda match: f"loading the model, {float(match[1]):.0%}"),
    (re.compile(r"loading"), lambda _: "loading the model"),
    (re.compile(r"prefill (\d+)/(\d+)"), lambda match: f"reading the prompt, {match[1]} of {match[2]} tokens"),
)


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
    """Token counts of one answer and its times, as the mesh reports them; 0 where it does not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_ms: int = 0
    decode_ms: int = 0


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
            return _progress(item.text)
        if item.data == DONE:
            self._done = True
            return []
        chunk = _object(item.data)
        error = chunk.get("error")
        if isinstance(error, dict) or item.event == "error":
            raise CliError(describe_error(error if isinstance(error, dict) else chunk))
        self._count(chunk.get("usage"), chunk.get("omniserve"))
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

    def _count(self, usage: object, timings: object) -> None:
        if not isinstance(usage, dict):
            return
        details, times = (
            value if isinstance(value, dict) else {} for value in (usage.get("prompt_tokens_details"), timings)
        )
        self.usage = Usage(
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            _count(details.get("cached_tokens")),
            queue_ms=_count(times.get("queue_ms")),
            decode_ms=_count(times.get("decode_ms")),
        )


def _progress(comment: str) -> list[ChatEvent]:
    for pattern, describe in _PROGRESS:
        if match := pattern.fullmatch(comment):
            return [Waiting(describe(match))]
    return []


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
