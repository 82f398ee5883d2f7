"""The one request of bench.transport, and the answer of its worker: a small chat, as every side can pass it on. Pure."""

from __future__ import annotations

import json

MODEL = "bench"
CHAT_PATH = "/v1/chat/completions"
SPEECH_PATH = "/v1/audio/speech"

_ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
_ANSWERED = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_767_225_600,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The capital of France is Paris."},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 14, "completion_tokens": 8, "total_tokens": 22},
}


def question(key: str = "") -> bytes:
    """Return the whole HTTP/1.1 request, on a connection that stays open. `key`: shown as a bearer token if any."""
    body = json.dumps(_ASKED).encode()
    shown = f"authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: bench\r\n{shown}content-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def answer() -> str:
    """Return the worker's answer as JSON, complete, so that no side needs to count tokens itself."""
    return json.dumps(_ANSWERED)
