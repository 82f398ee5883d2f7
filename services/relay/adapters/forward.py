"""Requests of services to workers, sent through Envoy's listener for the mesh: the same routes, the same gate."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from services.kit.access import CLIENT_KEY, REQUEST_ID_KEY, TIER_KEY, TOKEN_KEY, TRACEPARENT_KEY
from services.kit.context import current_request
from services.kit.errors import DomainError, Reason
from services.kit.http_client import OnDemand, httpx
from services.relay.core.forwarding import MIB, Outgoing, passed_on, refusal, too_large

_CONNECT_S: Final = 2.0
_LONGEST_REFUSAL: Final = 64 * 1024
_FIRST_ERROR: Final = 400
_MODE_KEY: Final = "x-omniserve-mode"


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer. `body` gives its pieces as they come, bytes untouched. `attempts`: as far as Envoy tells."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: AsyncIterator[bytes]
    backend: str
    attempts: int


class Forwarder:
    """Owns the connections. `address`: Envoy's mesh listener; `token`: relay's own service token."""

    def __init__(self, address: str, token: str) -> None:
        self._url = f"http://{address}"
        self._token = token
        self._client = OnDemand(
            lambda: httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
                follow_redirects=False,
            )
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def exchange(
        self, request: Outgoing, body: AsyncIterator[bytes], *, client: str, tier: str, request_id: str
    ) -> AsyncIterator[Answer]:
        """Send a request and give the worker's answer; leaving the block ends the exchange and frees its permit.

        `client`: whom the permit is booked for.

        Raises DomainError: what the mesh refuses by its own reason, upstream_failed for what breaks, too_large.
        """
        sent = self._client().build_request(
            request.method,
            httpx.URL(self._url + request.target),
            headers=self._headers(request, client, tier, request_id),
            content=_limited(body, request),
        )
        try:
            response = await self._client().send(sent, stream=True)
        except httpx.HTTPError as error:
            raise _failed(error) from error
        try:
            yield await _answer(response, request_id)
        finally:
            await response.aclose()

    def _headers(self, request: Outgoing, client: str, tier: str, request_id: str) -> list[tuple[str, str]]:
        headers = [*request.headers, (TOKEN_KEY, self._token), (REQUEST_ID_KEY, request_id)]
        headers += [(CLIENT_KEY, client), (TIER_KEY, tier)]
        if not request.may_wait:
            headers.append((_MODE_KEY, "try"))
        if request.body_bytes is not None:
            headers.append(("content-length", str(request.body_bytes)))
        current = current_request()
        if current is not None and current.traceparent and not any(name == TRACEPARENT_KEY for name, _ in headers):
            headers.append((TRACEPARENT_KEY, current.traceparent))
        return headers


async def _limited(body: AsyncIterator[bytes], request: Outgoing) -> AsyncIterator[bytes]:
    """Give the body's pieces. Raises DomainError when it is too large, or not as long as it was said to be."""
    total = 0
    declared = request.body_bytes
    async for piece in body:
        total += len(piece)
        if total > request.limit_bytes:
            raise too_large(total, request.limit_bytes // MIB)
        if declared is not None and total > declared:
            raise _mismatch(total, declared)
        yield piece
    if declared is not None and total < declared:
        raise _mismatch(total, declared)


def _mismatch(total: int, declared: int) -> DomainError:
    message = f"the body has {total} bytes so far, and {declared} were declared"
    return DomainError(Reason.INVALID_REQUEST, message, field="head.body_bytes")


async def _answer(response: "httpx.Response", request_id: str) -> Answer:
    """Return the answer. Raises DomainError when it is the mesh that answers."""
    pieces = _pieces(response)
    begun: list[bytes] = []
    is_json = response.headers.get("content-type", "").startswith("application/json")
    if response.status_code >= _FIRST_ERROR and is_json:
        begun = await _begin(pieces)
        refused = refusal(b"".join(begun), request_id, response.headers.get("retry-after", ""))
        if refused is not None:
            raise refused
    headers = [(name.decode("ascii").lower(), value.decode("latin-1")) for name, value in response.headers.raw]
    attempts = response.headers.get("x-omniserve-asr-attempts", "1")
    return Answer(
        status=response.status_code,
        headers=tuple(passed_on(headers)),
        body=_continued(begun, pieces),
        backend=response.headers.get("x-omniserve-asr-backend", ""),
        attempts=int(attempts) if attempts.isdecimal() else 1,
    )


async def _begin(pieces: AsyncIterator[bytes]) -> list[bytes]:
    """Return the pieces of a short body, or the first ones of a long one."""
    begun: list[bytes] = []
    async for piece in pieces:
        begun.append(piece)
        if sum(map(len, begun)) > _LONGEST_REFUSAL:
            break
    return begun


async def _continued(begun: list[bytes], pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for piece in begun:
        yield piece
    async for piece in pieces:
        yield piece


async def _pieces(response: "httpx.Response") -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    except httpx.HTTPError as error:
        raise _failed(error) from error


def _failed(error: "httpx.HTTPError") -> DomainError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return DomainError(Reason.UPSTREAM_FAILED, f"Envoy's mesh listener cannot be reached: {error}")
    return DomainError(Reason.UPSTREAM_FAILED, f"the exchange with the worker broke: {error or type(error).__name__}")
