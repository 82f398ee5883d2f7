"""Asks the front door for one streamed answer at a time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli import http

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from cli.chat.stream import ChatEvent, ChatReader

# The mesh sends a comment every 10 s once it has begun to answer; before that a request may wait in silence, at most
# until admission's deadline.
_SILENCE_S = 300.0
_PATH = "/v1/chat/completions"

Message = dict[str, str]


@dataclass(frozen=True)
class ChatOptions:
    """How to ask; None leaves the choice to the mesh."""

    model: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    tier: str | None = None


def request_body(messages: Sequence[Message], options: ChatOptions) -> dict[str, Any]:
    """Return the body of POST /v1/chat/completions. Nothing is sent that was not asked for."""
    chosen = {"model": options.model, "temperature": options.temperature, "max_tokens": options.max_tokens}
    return {
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in chosen.items() if value is not None},
    }


class ChatClient:
    """One front door. Reusing it keeps the connection open between answers."""

    def __init__(self, url: str, *, api_key: str, connect_s: float) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._client = http.new_client(connect_s=connect_s, read_s=_SILENCE_S, headers=headers)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def ask(self, messages: Sequence[Message], options: ChatOptions, reader: ChatReader) -> Generator[ChatEvent]:
        """Yield the answer's events as they come; closing the iterator early cancels the request.

        Raises CliError in one line: nothing answers, a refusal, an error event, an answer cut short.
        """
        body = request_body(messages, options)
        with closing(http.stream_events(self._client, self._url, _PATH, body, tier=options.tier)) as items:
            for item in items:
                yield from reader.read(item)
        reader.finish()
