"""Asks the front door for one streamed answer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from cli import http
from cli.errors import CliError
from cli.sse import SseDecoder

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from cli.chat.stream import ChatEvent, ChatReader

# The mesh sends a comment every 10 s once it has begun to answer; before that a request may wait in silence, at most
# until admission's deadline.
_SILENCE_S = 300.0

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
        headers = {"Accept": "text/event-stream"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = http.new_client(connect_s=connect_s, read_s=_SILENCE_S, headers=headers)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def ask(self, messages: Sequence[Message], options: ChatOptions, reader: ChatReader) -> Generator[ChatEvent]:
        """Yield the answer's events as they come; closing the iterator early cancels the request.

        Raises CliError in one line: nothing answers, a refusal, an error event, an answer cut short.
        """
        headers = {"X-Omniserve-Tier": options.tier} if options.tier else None
        body = request_body(messages, options)
        try:
            with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
                yield from _events(answer, reader)
        except (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError) as error:
            raise CliError(f"the answer was cut short: {http.transport_reason(error)} [stream_broken]") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise http.not_running(self._url, error) from error


def _events(answer: httpx.Response, reader: ChatReader) -> Iterator[ChatEvent]:
    if answer.status_code != httpx.codes.OK:
        raise http.refusal(answer.status_code, answer.read())
    kind = answer.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise CliError(f"the answer is {kind or 'of no type'}, not an event stream: is this the mesh's address?")
    decoder = SseDecoder()
    for piece in answer.iter_bytes():
        for item in decoder.feed(piece):
            yield from reader.read(item)
    reader.finish()
