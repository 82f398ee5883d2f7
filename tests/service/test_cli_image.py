"""`omniserve image` as a user runs it, against a real HTTP server that streams what each scenario says."""

import base64
import json
import os
import pty
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def event(kind: str, data: bytes, **ours: object) -> bytes:
    name = f"image_generation.{kind}"
    told = {"type": name, "b64_json": base64.b64encode(data).decode(), "size": "64x64", "omniserve": ours}
    return f"event: {name}\ndata: {json.dumps(told)}\n\n".encode()


DRAWING = [b": denoising 1/2\n\n", event("partial_image", b"half"), b": denoising 2/2\n\n"]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        status, pieces = self.server.answer
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if status == 200 else "application/json")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def door():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.answer = [], (200, [])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def start(door, folder, *arguments, **how):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNISERVE_")}
    environ |= {
        "OMNISERVE_CLI_URL": f"http://127.0.0.1:{door.server_port}",
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    command = [sys.executable, "-m", "cli.main", "image", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, timeout=60, check=False, **how)


def test_a_picture_is_written_and_its_seed_printed(door, tmp_path):
    door.answer = (200, [*DRAWING, event("completed", b"whole", seed=7, inference_time_ms=1500)])
    done = start(door, tmp_path, "a fox", "-o", "fox.webp", "--seed", "7", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "fox.webp  64x64, 5 B, seed 7, 1.5 s\n"
    assert (tmp_path / "fox.webp").read_bytes() == b"whole"
    assert [each.name for each in tmp_path.iterdir()] == ["fox.webp"]
    assert door.asked == [
        (
            "/v1/images/generations",
            {"prompt": "a fox", "stream": True, "partial_images": 3, "output_format": "webp", "seed": 7},
        )
    ]


def test_a_terminal_shows_the_steps_and_the_previews_size(door, tmp_path):
    door.answer = (200, [*DRAWING, event("completed", b"whole", seed=7)])
    ours, theirs = pty.openpty()
    try:
        done = start(door, tmp_path, "a fox", "-o", "fox.png", stdout=subprocess.DEVNULL, stderr=theirs)
        os.close(theirs)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
    assert done.returncode == 0
    assert "denoising" in shown
    assert "preview 1: 64x64, 4 B" in shown


def test_what_was_finished_before_a_failure_is_kept_and_the_failure_told(door, tmp_path):
    broken = b'event: error\ndata: {"error": {"message": "the engine died", "reason": "engine_failed"}}\n\n'
    door.answer = (200, [event("completed", b"one", seed=1), broken])
    done = start(door, tmp_path, "a fox", "-o", "fox.webp", "-n", "2", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "fox-1.webp  64x64, 3 B, seed 1\n")
    assert "the engine died" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["fox-1.webp"]


def test_a_refusal_is_one_line_and_no_file(door, tmp_path):
    refusal = {"error": {"message": "no picture model: set OMNISERVE_SD_MODEL", "reason": "not_found"}}
    door.answer = (404, [json.dumps(refusal).encode()])
    done = start(door, tmp_path, "a fox", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "set OMNISERVE_SD_MODEL [not_found, HTTP 404]" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["fox.gif", "nowhere/fox.webp"])
def test_a_file_that_cannot_be_is_said_before_anything_is_asked(door, tmp_path, output):
    done = start(door, tmp_path, "a fox", "-o", output, capture_output=True, text=True)
    assert done.returncode == 2
    assert door.asked == []
