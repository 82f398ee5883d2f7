"""`omniserve models pull` against a real HTTP server that breaks connections, changes files and answers badly."""

import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from cli import http
from cli.errors import CliError
from cli.models.download import Fetched, fetch

WHOLE = b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + os.urandom(300_000)
DIGEST = hashlib.sha256(WHOLE).hexdigest()


@dataclass
class Script:
    """What the server does; each request takes the next entry of `cuts`: bytes to send before it breaks, None for all."""

    content: bytes = WHOLE
    etag: str | None = '"v1"'
    ranges: bool = True
    status: list[int] = field(default_factory=list)
    cuts: list[int | None] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        script = self.server.script
        script.asked.append({name.lower(): value for name, value in self.headers.items()})
        if script.status and (status := script.status.pop(0)) != 200:
            self.send_response(status)
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = self._start(script)
        body = script.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(script.content) - 1}/{len(script.content)}")
        if script.etag:
            self.send_header("ETag", script.etag)
        self.end_headers()
        cut = script.cuts.pop(0) if script.cuts else None
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _start(self, script: Script) -> int:
        asked = self.headers.get("Range")
        condition = self.headers.get("If-Range")
        if not script.ranges or asked is None or (condition is not None and condition != script.etag):
            return 0
        return int(asked.removeprefix("bytes=").rstrip("-"))

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    script: Script

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/files/model.gguf"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.script = Script()
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


class Meter:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []

    def at(self, done: int, total: int | None) -> None:
        self.seen.append((done, total))


@dataclass
class Pull:
    url: str
    target: object
    waits: list[float] = field(default_factory=list)
    sleep: Callable[[float], None] | None = None
    notes: list[str] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)

    def __call__(self, sha256: str | None = None) -> Fetched:
        with http.new_client(read_s=5.0) as client:
            return fetch(
                client,
                self.url,
                self.target,
                sha256=sha256,
                meter=self.meter,
                note=self.notes.append,
                sleep=self.sleep or self.waits.append,
                now=lambda: 0.0,
            )


@pytest.fixture
def pull(server, tmp_path) -> Pull:
    return Pull(server.url, tmp_path / "model.gguf")


def left_behind(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_connection_that_breaks_twice_is_resumed_where_it_broke(server, pull, tmp_path):
    server.script.cuts = [100_000, 50_000]
    fetched = pull(DIGEST)
    assert fetched.path.read_bytes() == WHOLE
    assert fetched.sha256 == DIGEST
    assert [asked.get("range") for asked in server.script.asked] == [None, "bytes=100000-", "bytes=150000-"]
    assert [asked.get("if-range") for asked in server.script.asked] == [None, '"v1"', '"v1"']
    assert left_behind(tmp_path) == ["model.gguf"]
    assert pull.meter.seen[-1] == (len(WHOLE), len(WHOLE))


def test_a_later_command_resumes_what_an_earlier_one_left(server, pull, tmp_path):
    server.script.cuts = [100_000, 0, 0, 0, 0, 0]
    with pytest.raises(CliError, match="run the same command again to resume"):
        pull()
    assert left_behind(tmp_path) == ["model.gguf.part", "model.gguf.part.json"]
    server.script.cuts = []
    server.script.asked = []
    assert pull(DIGEST).path.read_bytes() == WHOLE
    assert server.script.asked[0]["range"] == "bytes=100000-"


def test_a_file_that_changed_between_two_tries_is_fetched_anew_and_never_mixed(server, pull):
    server.script.cuts = [100_000]
    other = WHOLE[:28] + bytes(300_000)

    def change(_: float) -> None:
        server.script.content, server.script.etag = other, '"v2"'

    pull.sleep = change
    assert pull().path.read_bytes() == other


def test_a_server_without_ranges_is_fetched_from_the_start(server, pull):
    server.script.ranges = False
    server.script.cuts = [100_000]
    assert pull(DIGEST).path.read_bytes() == WHOLE


def test_a_server_without_ranges_that_always_breaks_is_given_up(server, pull):
    server.script.ranges = False
    server.script.cuts = [100_000] * 20
    with pytest.raises(CliError, match="closed it early"):
        pull()
    assert len(server.script.asked) < 10


def test_a_busy_server_is_asked_again_after_the_time_it_names(server, pull):
    server.script.status = [503, 429, 200]
    assert pull(DIGEST).sha256 == DIGEST
    assert pull.waits == [1.0, 1.0]


def test_a_wrong_checksum_throws_the_download_away(server, pull, tmp_path):
    with pytest.raises(CliError, match=f"SHA-256 is {DIGEST}, expected {'0' * 64}"):
        pull("0" * 64)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    "body", [b"<!DOCTYPE html><html>log in</html>", b"version https://git-lfs.example", b"PK\x03\x04"]
)
def test_what_is_no_gguf_is_refused_at_its_first_bytes(server, pull, tmp_path, body):
    server.script.content = body + bytes(100)
    with pytest.raises(CliError, match=r"not (a GGUF file|the model)"):
        pull()
    assert left_behind(tmp_path) == []


def test_a_file_smaller_than_its_magic_is_refused(server, pull, tmp_path):
    server.script.content = b"GG"
    with pytest.raises(CliError, match="cut short"):
        pull()
    assert left_behind(tmp_path) == []


def test_a_missing_file_is_one_line(server, pull, tmp_path):
    server.script.status = [404]
    with pytest.raises(CliError, match="404 Not Found"):
        pull()
    assert left_behind(tmp_path) == []


def test_too_small_a_disk_is_said_before_a_byte_is_fetched(server, pull, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("cli.models.store.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(CliError, match="not enough disk space"):
        pull()
    assert left_behind(tmp_path) == []


def test_nobody_listening_is_one_line_that_names_the_folder(pull, tmp_path):
    pull.url = "http://127.0.0.1:1/model.gguf"
    with pytest.raises(CliError) as caught:
        pull()
    assert "\n" not in caught.value.message
    assert "copy it to" in caught.value.message
    assert isinstance(caught.value.__cause__, httpx.TransportError)
