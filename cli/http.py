"""The commands' HTTP client, and errors from far away in one line."""

from __future__ import annotations

import http as standard
import json
from typing import TYPE_CHECKING, Any

from cli.errors import CliError
from cli.sse import SseDecoder
from cli.terminal import one_line
from services.kit.http_client import httpx

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from cli.sse import SseComment, SseEvent

START_HINT = "start the mesh with `make run` (foreground) or `make up` (background)"


def new_client(
    *, connect_s: float = 5.0, read_s: float | None = 30.0, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """Return a client with separate limits for connecting and for waiting between two bytes; None waits without limit."""
    return httpx.Client(timeout=httpx.Timeout(read_s, connect=connect_s, pool=None), headers=headers)


def transport_reason(error: Exception) -> str:
    """Say in a few words why no answer came."""
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException):
        return "no byte in time"
    if isinstance(error, httpx.RemoteProtocolError):
        return "the other side closed it early"
    return one_line(str(error), limit=160) or type(error).__name__


def status_phrase(status: int) -> str:
    """Return e.g. `404 Not Found`."""
    try:
        return f"{status} {standard.HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def not_running(url: str, error: Exception) -> CliError:
    """Return the error for a mesh that does not answer at `url`."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return CliError(f"{url!r} is not an http(s) address; set OMNISERVE_CLI_URL or give --url")
    return CliError(f"nothing answers at {url} ({transport_reason(error)}): {START_HINT}")


def refusal(status: int, body: bytes) -> CliError:
    """Return the error for an answer with an error status, from its OpenAI-shaped body when it has one."""
    error = _error_object(body)
    if error is None:
        text = one_line(body.decode("utf-8", "replace"), limit=200)
        return CliError(f"{status_phrase(status)}: {text}" if text else f"the mesh answered {status_phrase(status)}")
    return CliError(describe_error(error, status))


def describe_error(error: Mapping[str, Any], status: int | None = None) -> str:
    """Return one line for an OpenAI-shaped error object: message, reason, when to come back, request id."""
    message = one_line(str(error.get("message") or "no message"))
    reason = error.get("reason") or error.get("code") or error.get("type")
    status = status if status is not None else _number(error.get("status"))
    details = [str(reason)] if reason else []
    if status is not None:
        details.append(f"HTTP {status}")
    if error.get("param"):
        details.append(f"field {error['param']}")
    retry_ms = _number(error.get("retry_after_ms"))
    if retry_ms is not None:
        details.append(f"try again in {max(1, round(retry_ms / 1000))} s")
    if error.get("request_id"):
        details.append(f"request {error['request_id']}")
    return f"{message} [{one_line(', '.join(details))}]" if details else message


def stream_events(
    client: httpx.Client, url: str, path: str, body: Mapping[str, Any], *, tier: str | None = None
) -> Generator[SseEvent | SseComment]:
    """Yield what POST `path` at the front door `url` streams, as it comes; closing the iterator early cancels the request.

    Raises CliError in one line: nothing answers, a refusal, no event stream, a stream that breaks.
    """
    headers = {"Accept": "text/event-stream"} | ({"X-Omniserve-Tier": tier} if tier else {})
    try:
        with client.stream("POST", f"{url}{path}", json=body, headers=headers) as answer:
            yield from _events(answer)
    except (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError) as error:
        raise CliError(f"the answer was cut short: {transport_reason(error)} [stream_broken]") from error
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise not_running(url, error) from error


def _events(answer: httpx.Response) -> Iterator[SseEvent | SseComment]:
    if answer.status_code != httpx.codes.OK:
        raise refusal(answer.status_code, answer.read())
    kind = answer.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise CliError(f"the answer is {kind or 'of no type'}, not an event stream: is this the mesh's address?")
    decoder = SseDecoder()
    for piece in answer.iter_bytes():
        yield from decoder.feed(piece)


def get_object(client: httpx.Client, url: str) -> dict[str, Any]:
    """Return the JSON object that GET `url` answers.

    Raises CliError in one line: nothing answers, an error status, or something else than a JSON object.
    """
    return _object_of(client, client.build_request("GET", url))


def post_object(client: httpx.Client, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object that POST `url` answers. Raises CliError as get_object does."""
    return _object_of(client, client.build_request("POST", url, json=body))


def _object_of(client: httpx.Client, request: httpx.Request) -> dict[str, Any]:
    url = str(request.url)
    try:
        answer = client.send(request)
    except httpx.TransportError as error:
        raise not_running(url, error) from error
    if answer.status_code != httpx.codes.OK:
        raise refusal(answer.status_code, answer.content)
    return json_object(answer, url)


def json_object(answer: httpx.Response, url: str) -> dict[str, Any]:
    """Return the JSON object of an answer. Raises CliError when it is something else."""
    try:
        decoded = answer.json()
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise CliError(
            f"{url} answers {status_phrase(answer.status_code)}, but with no JSON object: is this the mesh's address?"
        )
    return decoded


def _error_object(body: bytes) -> Mapping[str, Any] | None:
    try:
        decoded = json.loads(body)
    except ValueError:
        return None
    error = decoded.get("error") if isinstance(decoded, dict) else None
    return error if isinstance(error, dict) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
