"""`omniserve models pull owner/name` with the hub's own library against a small local hub, as a user runs it."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40


def gguf(size: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + os.urandom(size)


@dataclass
class Repo:
    """A repository by path. `cuts`: bytes to send before a download breaks, one for each request."""

    files: dict[str, bytes]
    digests: dict[str, str] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def digest(self, path: str) -> str:
        return self.digests.get(path, hashlib.sha256(self.files[path]).hexdigest())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Hub"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.repo.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if path.startswith("/api/models/owner/name"):
            self._json(200, self._info())
        elif (
            path.startswith(prefix := f"/owner/name/resolve/{COMMIT}/")
            and path.removeprefix(prefix) in self.server.repo.files
        ):
            self._file(path.removeprefix(prefix), with_body=with_body)
        else:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def _info(self) -> dict[str, object]:
        repo = self.server.repo
        siblings = [
            {
                "rfilename": path,
                "size": len(content),
                "blobId": "0" * 40,
                "lfs": {"size": len(content), "sha256": repo.digest(path), "pointerSize": 1},
            }
            for path, content in repo.files.items()
        ]
        return {"id": "owner/name", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False, "downloads": 0}

    def _file(self, path: str, *, with_body: bool) -> None:
        repo = self.server.repo
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        content = repo.files[path]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{repo.digest(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if with_body:
            cut = repo.cuts.pop(0) if repo.cuts else None
            self.wfile.write(content[start:][:cut])
            if cut is not None:
                self.close_connection = True

    def _json(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            **(headers or {}),
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class Hub(ThreadingHTTPServer):
    daemon_threads = True
    repo: Repo


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), Handler) as running:
        running.repo = Repo({"README.md": b"hello", "m-Q4_K_M.gguf": gguf(200_000), "m-Q8_0.gguf": gguf(300_000)})
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


Pull = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pull(hub: Hub, tmp_path: Path) -> Pull:
    def run(*arguments: str, endpoint: str | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMNISERVE_", "HF_"))}
        environ |= {
            "HF_ENDPOINT": endpoint or f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "OMNISERVE_MODELS_DIR": str(tmp_path / "models"),
            "PYTHONPATH": str(ROOT),
            **extra,
        }
        command = [sys.executable, "-m", "cli.main", "models", "pull", *arguments]
        return subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def left_behind(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_model_chosen_by_its_quantisation_lands_whole_and_checked(hub, pull, tmp_path):
    done = pull("owner/name:q4_k_m")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models/m-Q4_K_M.gguf").read_bytes() == hub.repo.files["m-Q4_K_M.gguf"]
    assert left_behind(tmp_path / "models") == ["m-Q4_K_M.gguf"]
    assert hub.repo.digest("m-Q4_K_M.gguf") in done.stdout


def test_a_connection_that_breaks_midway_is_resumed(hub, pull, tmp_path):
    # The hub's library writes in pieces of 10 MiB: what came before the last whole piece is kept.
    hub.repo.files["m-Q8_0.gguf"] = gguf(12 << 20)
    hub.repo.cuts = [11 << 20]
    done = pull("owner/name:Q8_0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models/m-Q8_0.gguf").read_bytes() == hub.repo.files["m-Q8_0.gguf"]
    downloads = [line for line in hub.repo.asked if line.startswith("GET /owner")]
    assert downloads[1].endswith(f"bytes={10 << 20}-")


def test_several_models_without_a_choice_are_listed(pull):
    done = pull("owner/name")
    assert done.returncode == 1
    assert "owner/name:Q4_K_M" in done.stderr
    assert "owner/name:Q8_0" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_there_already_is_not_fetched_again(hub, pull):
    pull("owner/name:Q4_K_M")
    hub.repo.asked.clear()
    done = pull("owner/name:Q4_K_M")
    assert done.returncode == 0
    assert "there already" in done.stderr
    assert not any("resolve" in line for line in hub.repo.asked)


def test_another_file_of_the_same_name_is_never_overwritten_by_accident(hub, pull, tmp_path):
    pull("owner/name:Q4_K_M")
    hub.repo.files["m-Q4_K_M.gguf"] = gguf(10)
    refused = pull("owner/name:Q4_K_M")
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    assert pull("owner/name:Q4_K_M", "--force").returncode == 0
    assert (tmp_path / "models/m-Q4_K_M.gguf").read_bytes() == hub.repo.files["m-Q4_K_M.gguf"]


def test_content_that_is_not_what_the_hub_states_is_thrown_away(hub, pull, tmp_path):
    hub.repo.digests["m-Q4_K_M.gguf"] = "a" * 64
    done = pull("owner/name:Q4_K_M")
    assert done.returncode == 1
    assert "checksum" in done.stderr
    assert not [name for name in left_behind(tmp_path / "models") if name.endswith(".gguf")]


def test_a_digest_that_the_hub_contradicts_is_refused_before_anything_is_fetched(hub, pull):
    done = pull("owner/name:Q4_K_M", "--sha256", "b" * 64)
    assert done.returncode == 1
    assert "nothing was fetched" in done.stderr
    assert not any("resolve" in line for line in hub.repo.asked)


def test_an_unknown_repository_is_one_line(pull):
    done = pull("owner/other")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "does not exist" in done.stderr


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_a_machine_without_internet_says_so_in_one_line(pull, endpoint):
    done = pull("owner/name", endpoint=endpoint)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "Without internet access" in done.stderr


def test_the_hubs_offline_switch_is_named(pull):
    done = pull("owner/name", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE is set" in done.stderr
