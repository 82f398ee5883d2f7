"""What one streamed HTTP answer said: pure parsing of its bytes, after the clock has stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of one SSE answer of an OpenAI-style route."""

    status: int
    events: int
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    done: bool
    error: str | None


def parse(raw: bytes) -> Answer:
    """Read status line, headers, chunked body and its events; whatever is missing stays None or False."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *header_lines = head.split(b"\r\n")
    status = int(status_line.split(b" ")[1]) if status_line.count(b" ") else 0
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in header_lines)
    }
    content = dechunk(body) if headers.get(b"transfer-encoding", b"").lower() == b"chunked" else body
    if status != 200:
        return Answer(status, 0, "", None, None, None, None, done=False, error=content.decode(errors="replace")[:500])
    data = [line[5:].strip() for line in content.split(b"\n") if line.startswith(b"data:")]
    events: list[dict[str, Any]] = [json.loads(item) for item in data if item != b"[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    usage: dict[str, Any] = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    return Answer(
        status=status,
        events=len(events),
        text="".join(_piece(choice) for choice in choices),
        finish_reason=next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        done=b"[DONE]" in data,
        error=next((json.dumps(event["error"]) for event in events if "error" in event), None),
    )


def dechunk(body: bytes) -> bytes:
    """Body of a chunked transfer; a transfer that was cut short gives what had arrived."""
    pieces = []
    while body:
        size_line, found, body = body.partition(b"\r\n")
        if not found:
            break
        size = int(size_line.split(b";")[0], 16)
        pieces.append(body[:size])
        body = body[size + 2 :]
    return b"".join(pieces)


def _piece(choice: dict[str, Any]) -> str:
    piece = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return piece if isinstance(piece, str) else ""
