"""The server under test as callers see it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LIMIT_S: Final = 900.0
ABSENT: Final = frozenset({404, 405, 501, 503})
"""Statuses by which a server says that it has no such engine."""


class ServerError(Exception):
    """The server gave no answer to what every server must answer."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of a chat. `seconds`: from the request to the whole answer."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float


class Server:
    """One server. `url`: its address without `/v1`. `force_local`: name the model that it lists as its own in each request."""

    def __init__(
        self, url: str, *, api_key: str = "", force_local: bool = False, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(_LIMIT_S, connect=10.0)
        self._client = httpx.Client(base_url=self.url, timeout=timeout, headers=headers, transport=transport)
        self._force_local = force_local
        self._models: list[dict[str, Any]] | None = None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def models(self, kind: str) -> list[str]:
        """Return the models of a kind (chat, embedding, ...) that the server runs itself."""
        if self._models is None:
            self._models = self._json("GET", "/v1/models", None)["data"]
        return [each["id"] for each in self._models if each.get("omniserve", {}).get("kind") == kind]

    def chat(self, prompt: str, **fields: object) -> Said:
        """Return the greedy answer to a question. Raises ServerError."""
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, **self._named("chat"), **fields}
        began_s = time.perf_counter()
        answer = self._json("POST", "/v1/chat/completions", body)
        seconds = time.perf_counter() - began_s
        choice, usage = answer["choices"][0], answer["usage"]
        return Said(
            text=choice["message"]["content"] or "",
            finish_reason=choice["finish_reason"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            completion_tokens=usage["completion_tokens"],
            seconds=seconds,
        )

    def generate(self, text: str, **fields: object) -> str:
        """Return the text generator's continuation. Raises ServerError."""
        body = {"text": text, "temperature": 0, **self._named("chat"), **fields}
        return str(self._json("POST", "/api/v1/generate", body)[0]["generated_text"])

    def embed(self, *texts: str) -> list[list[float]]:
        """Return the vectors of texts, computed by one request. Raises ServerError."""
        model = self._named("embedding").get("model") or next(iter(self.models("embedding")), "default")
        body = {"model": model, "input": list(texts), "encoding_format": "float"}
        return [each["embedding"] for each in self._json("POST", "/v1/embeddings", body)["data"]]

    def features(self, text: str, **fields: object) -> list[float]:
        """Return the flat vector of the older route. Raises ServerError."""
        answer: list[float] = self._json("POST", "/api/v1/feature-extraction", {"text": text, **fields})
        return answer

    def bytes_of(self, path: str, body: Mapping[str, object]) -> bytes | None:
        """Return what a route answers; None when the server has no engine for it. Raises ServerError."""
        response = self._send("POST", path, body)
        if response.status_code in ABSENT:
            return None
        return self._checked(response, path).content

    def _named(self, kind: str) -> dict[str, str]:
        if not self._force_local:
            return {}
        own: Sequence[str] = self.models(kind)
        if not own:
            raise ServerError(f"{self.url} lists no {kind} model as its own")
        return {"model": own[0]}

    def _json(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:  # noqa: ANN401 - JSON
        response = self._checked(self._send(method, path, body), path)
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{path} answered no JSON: {response.text[:200]}") from error

    def _send(self, method: str, path: str, body: Mapping[str, object] | None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path} cannot be reached: {error}") from error

    @staticmethod
    def _checked(response: httpx.Response, path: str) -> httpx.Response:
        if response.is_error:
            raise ServerError(f"{path} answered {response.status_code}: {response.text[:300]}")
        return response
