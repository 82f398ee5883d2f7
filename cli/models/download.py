"""Fetches one file over HTTP, resuming where an earlier try, or an earlier command, was cut off."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Protocol

from cli import http
from cli.errors import CliError
from cli.models import store
from cli.models.gguf import MAGIC, describe_foreign
from cli.models.partial import Origin, PartFile
from services.kit.http_client import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from cli.models.gguf import GgufHeader

_TRIES_WITHOUT_PROGRESS = 5
_LONGEST_WAIT_S = 30.0
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class Meter(Protocol):
    """Shows how far a download is. Sizes are bytes."""

    def at(self, done: int, total: int | None) -> None:
        """Say how much is there, and how much there will be if that is known."""


@dataclass(frozen=True)
class Fetched:
    """A finished download."""

    path: Path
    sha256: str
    header: GgufHeader


@dataclass(frozen=True)
class Append:
    """The answer continues the part. `total` is the size of the whole file."""

    total: int | None


@dataclass(frozen=True)
class Whole:
    """The answer is the whole file from its first byte: what is there is of no use."""

    total: int | None


@dataclass(frozen=True)
class Complete:
    """Nothing is missing any more."""


@dataclass(frozen=True)
class Changed:
    """The part belongs to another version of the file: ask again, from the first byte."""


def range_headers(have: int, origin: Origin | None) -> dict[str, str]:
    """Return the headers that ask for what is missing after `have` bytes of `origin`."""
    if not have or origin is None:
        return {}
    headers = {"Range": f"bytes={have}-"}
    if origin.validator:
        headers["If-Range"] = origin.validator
    return headers


def validator_of(headers: Mapping[str, str]) -> str | None:
    """Return what identifies this version of the file: a strong ETag, else the date. A weak ETag proves nothing byte by byte."""
    etag = headers.get("etag", "")
    if etag.startswith('"'):
        return etag
    return headers.get("last-modified") or None


def read_answer(
    status: int, headers: Mapping[str, str], have: int, origin: Origin | None
) -> Append | Whole | Complete | Changed:
    """Decide what an answer means for a part of `have` bytes; `status` is 200, 206 or 416."""
    if status == httpx.codes.PARTIAL_CONTENT:
        return _read_partial(headers, have, origin)
    if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
        total = headers.get("content-range", "").rpartition("/")[2]
        return Complete() if total.isdigit() and int(total) == have else Changed()
    length = headers.get("content-length", "")
    return Whole(int(length) if length.isdigit() else None)


def _read_partial(headers: Mapping[str, str], have: int, origin: Origin | None) -> Append | Changed:
    match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if not match or int(match[1]) != have:
        return Changed()
    total = None if match[2] == "*" else int(match[2])
    known = origin.total if origin else None
    if known is not None and total is not None and total != known:
        return Changed()
    return Append(total if total is not None else known)


def wait_before(tries: int, retry_after: str | None, now: float) -> float:
    """Return the seconds to wait before try number `tries` + 1: what the server asked for, else doubling from one."""
    asked = _seconds(retry_after, now) if retry_after else None
    return min(_LONGEST_WAIT_S, 2.0 ** (tries - 1) if asked is None else max(0.0, asked))


def _seconds(retry_after: str, now: float) -> float | None:
    if retry_after.isdigit():
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - now
    except ValueError:
        return None


class _Retry(Exception):  # noqa: N818  not an error but the way back to the next try
    def __init__(self, why: str, retry_after: str | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


def fetch(
    client: httpx.Client,
    url: str,
    target: Path,
    *,
    sha256: str | None,
    meter: Meter,
    note: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Fetched:
    """Fetch `url` to `target`, which appears only when it is whole and checked.

    `sha256`: the expected digest, or None. Raises CliError with one line; what was fetched stays in `<target>.part`
    and a later call goes on from there, unless it was proven wrong.
    """
    with PartFile(target) as part:
        download = _Download(client, url, part, target, meter)
        download.origin = part.resume(url)
        if part.size:
            note(f"resuming {target.name} at {part.size} bytes")
        _until_complete(download, note, sleep, now)
        digest = part.finish()
        if sha256 is not None and digest != sha256:
            part.discard()
            raise CliError(f"{target.name}: SHA-256 is {digest}, expected {sha256}; the download was thrown away")
        try:
            header = store.publish(part.path, target)
        finally:
            part.forget_origin()
    return Fetched(target, digest, header)


def _until_complete(
    download: _Download, note: Callable[[str], None], sleep: Callable[[float], None], now: Callable[[], float]
) -> None:
    tries, furthest = 0, download.part.size
    while True:
        try:
            return download.attempt()
        except _Retry as reason:
            tries = 1 if download.part.size > furthest else tries + 1
            furthest = max(furthest, download.part.size)
            if tries >= _TRIES_WITHOUT_PROGRESS:
                raise CliError(f"{download.target.name}: {reason}; run the same command again to resume") from reason
            wait = wait_before(tries, reason.retry_after, now())
            note(f"{reason}; going on at {download.part.size} bytes in {wait:.0f} s")
            sleep(wait)


class _Download:
    """One file on its way: each attempt asks for what is missing."""

    def __init__(self, client: httpx.Client, url: str, part: PartFile, target: Path, meter: Meter) -> None:
        self.client = client
        self.url = url
        self.part = part
        self.target = target
        self.meter = meter
        self.origin: Origin | None = None

    def attempt(self) -> None:
        """Ask once and take what comes. Raises _Retry when more may come later, CliError when not."""
        # Byte counts and digests are those of the file, so it must not be compressed on the way.
        headers = {"Accept-Encoding": "identity", **range_headers(self.part.size, self.origin)}
        try:
            with self.client.stream("GET", self.url, headers=headers, follow_redirects=True) as answer:
                self._take(answer)
        except httpx.TransportError as error:
            if self.part.size == 0 and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise CliError(unreachable(self.url, error, self.target.parent)) from error
            raise _Retry(f"the connection broke ({http.transport_reason(error)})") from error
        except httpx.TooManyRedirects as error:
            raise CliError(f"{self.url} redirects in circles") from error

    def _take(self, answer: httpx.Response) -> None:
        self._check(answer)
        match read_answer(answer.status_code, answer.headers, self.part.size, self.origin):
            case Complete():
                return
            case Changed():
                self.part.start_over()
                self.origin = None
                raise _Retry("the file changed at its source")
            case Whole(total):
                self.part.start_over()
            case Append(total):
                pass
        self.origin = Origin(self.url, validator_of(answer.headers), total)
        self.part.belongs_to(self.origin)
        if total is not None:
            store.require_space(self.target.parent, total - self.part.size)
        self._receive(answer, total)

    def _check(self, answer: httpx.Response) -> None:
        status = answer.status_code
        if self.url.startswith("https://") and answer.url.scheme != "https":
            raise CliError(f"{self.url} leads to an unencrypted address ({answer.url.host}); refused")
        if status in _RETRIED_STATUS:
            raise _Retry(f"the server answered {http.status_phrase(status)}", answer.headers.get("retry-after"))
        if status not in (200, 206, 416):
            raise CliError(f"cannot fetch {self.url}: the server answered {http.status_phrase(status)}")
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise CliError(f"cannot fetch {self.url}: the server compresses the file although it was asked not to")

    def _receive(self, answer: httpx.Response, total: int | None) -> None:
        head = b"" if self.part.size == 0 else MAGIC
        self.meter.at(self.part.size, total)
        for piece in answer.iter_raw():
            self._write(piece)
            if len(head) < len(MAGIC):
                head += piece[: len(MAGIC) - len(head)]
                if len(head) == len(MAGIC) and head != MAGIC:
                    self.part.discard()
                    raise CliError(f"{self.url}: {describe_foreign(piece[:64])}")
            self.meter.at(self.part.size, total)
        if total is not None and self.part.size < total:
            raise _Retry(f"the connection ended {total - self.part.size} bytes early")
        if total is not None and self.part.size > total:
            self.part.discard()
            raise CliError(f"{self.target.name}: {self.part.size} bytes came, {total} were announced; thrown away")

    def _write(self, piece: bytes) -> None:
        try:
            self.part.write(piece)
        except OSError as error:
            raise CliError(
                f"cannot write {self.part.path}: {error.strerror}; run the same command again to resume"
            ) from error


def unreachable(url: str, error: Exception, folder: Path) -> str:
    """Return the one line for a machine that cannot get there."""
    return (
        f"cannot reach {httpx.URL(url).host}: {http.transport_reason(error)}. "
        f"Without internet access, fetch the file elsewhere and copy it to {folder}"
    )
