"""`omniserve chat` as a user runs it, against a real HTTP server that streams what each scenario says."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BREAK = object()
WAIT = object()


def chunk(text: str | None = None, finish: str | None = None, **delta: str) -> bytes:
    body = {
        "choices": [
            {"index": 0, "delta": {**delta, **({"content": text} if text is not None else {})}, "finish_reason": finish}
        ]
    }
    return f"data: {json.dumps(body)}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
DONE = b"data: [DONE]\n\n"
PARIS = [chunk(role="assistant"), chunk("The capital "), chunk("is Paris."), chunk(finish="stop"), USAGE, DONE]


@dataclass
class Answer:
    """One scripted answer. Among the pieces BREAK ends the connection midway, WAIT goes on until the client has left."""

    pieces: list[object]
    status: int = 200
    content_type: str = "text/event-stream"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FrontDoor"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers.items()), body))
        answer = self.server.answers.pop(0)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in answer.pieces:
            if piece is BREAK:
                self.close_connection = True
                return
            if piece is WAIT:
                self.server.waiting.set()
                with contextlib.suppress(ConnectionResetError):
                    while self.connection.recv(1024):
                        pass
                self.server.left.set()
                self.close_connection = True
                return
            assert isinstance(piece, bytes)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        pass


class FrontDoor(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, dict[str, str], dict[str, object]]] = []
        self.waiting = threading.Event()
        self.left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def said(self, number: int = -1) -> list[dict[str, str]]:
        messages = self.asked[number][2]["messages"]
        assert isinstance(messages, list)
        return messages


@pytest.fixture
def door() -> Iterator[FrontDoor]:
    with FrontDoor() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def environ(door: FrontDoor, tmp_path: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMNISERVE_")}
    return inherited | {
        "OMNISERVE_CLI_URL": door.url,
        "OMNISERVE_CLI_HISTORY": str(tmp_path / "history"),
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
    }


Chat = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def chat(environ: dict[str, str]) -> Chat:
    def run(*arguments: str, piped: str | bytes | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", "chat", *arguments],
            env=environ | extra,
            input=piped.encode() if isinstance(piped, str) else piped,
            stdin=subprocess.DEVNULL if piped is None else None,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


def test_one_prompt_prints_the_answer_and_nothing_else(door, chat):
    door.answers = [Answer(PARIS)]
    done = chat("What is the capital of France?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital is Paris.\n", "")
    path, headers, body = door.asked[0]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body == {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_every_option_reaches_the_mesh(door, chat):
    door.answers = [Answer(PARIS)]
    options = ["--model", "m1", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--tier", "paid"]
    assert chat("Hi", *options, OMNISERVE_API_KEY="sesame").returncode == 0
    _, headers, body = door.asked[0]
    assert headers["Authorization"] == "Bearer sesame"
    assert headers["X-Omniserve-Tier"] == "paid"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m1", 0.0, 9)
    assert door.said() == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_pipe_is_the_prompt(door, chat):
    door.answers = [Answer(PARIS)]
    assert chat(piped="From a pipe\n").stdout == "The capital is Paris.\n"
    assert door.said()[0]["content"] == "From a pipe\n"


def test_an_argument_says_what_to_do_with_what_was_piped(door, chat):
    door.answers = [Answer(PARIS)]
    chat("Summarise:", piped="long text")
    assert door.said()[0]["content"] == "Summarise:\n\nlong text"


@pytest.mark.parametrize(
    ("piped", "says"),
    [(None, "no prompt"), ("", "prompt is empty"), (" \n", "prompt is empty"), (b"a\xff", "byte 1 is 0xff")],
)
def test_no_prompt_at_all_is_said_without_asking_the_mesh(door, chat, piped, says):
    done = chat(piped=piped)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert door.asked == []


def test_statistics_tell_the_tokens_and_their_rate(door, chat):
    door.answers = [Answer(PARIS)]
    done = chat("Hi", "--stats")
    assert re.search(
        r"^3 tokens, [\d.]+ tokens/s, first after \d+\.\d\d s, prompt 7 tokens \(4 cached\)$", done.stderr, re.MULTILINE
    )


def test_an_answer_at_the_token_limit_says_so(door, chat):
    door.answers = [Answer([chunk("Once"), chunk(finish="length"), DONE])]
    assert "token limit" in chat("Tell a story").stderr


def test_reasoning_stays_out_of_a_pipe(door, chat):
    door.answers = [Answer([chunk(reasoning_content="hmm"), *PARIS])]
    assert chat("Hi").stdout == "The capital is Paris.\n"


REFUSED = {
    "error": {"message": "Unknown model 'x'.", "type": "invalid_request_error", "param": "model", "code": "model_not_found",
              "reason": "not_found", "request_id": "r-1"}
}  # fmt: skip


def test_a_refusal_is_one_line_with_its_reason(door, chat):
    door.answers = [Answer([json.dumps(REFUSED).encode()], status=404, content_type="application/json")]
    done = chat("Hi", "--model", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "omniserve: Unknown model 'x'. [not_found, HTTP 404, field model, request r-1]\n"


@pytest.mark.parametrize("event", ["", "event: error\n"])
def test_an_error_in_the_middle_keeps_what_came_and_says_why(door, chat, event):
    error = {"error": {"message": "The engine died.", "reason": "engine_failed", "status": 500, "retry_after_ms": 2400}}
    door.answers = [Answer([chunk("Half an"), f"{event}data: {json.dumps(error)}\n\n".encode()])]
    done = chat("Hi")
    assert (done.returncode, done.stdout) == (1, "Half an\n")
    assert done.stderr == "omniserve: The engine died. [engine_failed, HTTP 500, try again in 2 s]\n"


@pytest.mark.parametrize("last", [[], [BREAK]])
def test_a_stream_that_ends_without_its_closing_mark_is_never_taken_for_an_answer(door, chat, last):
    door.answers = [Answer([chunk("Half an"), *last])]
    done = chat("Hi")
    assert done.returncode == 1
    assert "cut short" in done.stderr


def test_something_else_behind_the_address_is_recognised(door, chat):
    door.answers = [Answer([b"<html>"], content_type="text/html")]
    assert "is this the mesh's address?" in chat("Hi").stderr


def test_nobody_behind_the_address_says_how_to_start_the_mesh(chat):
    done = chat("Hi", "--url", "http://127.0.0.1:1/v1/")
    assert done.returncode == 1
    assert re.fullmatch(
        r"omniserve: nothing answers at http://127\.0\.0\.1:1 \(.*\): start the mesh with `make run`.*\n", done.stderr
    )


def test_debug_shows_the_traceback_and_nothing_else_does(chat):
    assert "Traceback" in chat("Hi", "--url", "http://127.0.0.1:1", "--debug").stderr


def test_a_reader_that_leaves_ends_the_command_quietly(door, environ):
    door.answers = [Answer([chunk("line\n" * 50_000), chunk("more"), DONE])]
    command = f"{sys.executable} -m cli.main chat Hi | head -n 1"
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("line\n", "")


def test_ctrl_c_cancels_the_one_answer_and_leaves(door, environ):
    door.answers = [Answer([chunk("Half an"), WAIT])]
    command = [sys.executable, "-m", "cli.main", "chat", "Hi"]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(7) == b"Half an"
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    assert (running.returncode, out, err) == (130, b"\n", b"omniserve: stopped\n")
    assert door.left.wait(30)


class Terminal:
    """The command on a terminal of its own: type, and read the screen until something stands there."""

    def __init__(self, environ: dict[str, str], *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.screen = ""
        # The first terminal that a new session opens becomes its own: only then does Ctrl-C reach the command.
        attach = 'exec "$@" <"$0" >"$0" 2>&1'
        command = ["sh", "-c", attach, os.ttyname(slave), sys.executable, "-m", "cli.main", "chat", *arguments]
        self.process = subprocess.Popen(command, env=environ, start_new_session=True)
        # Kept open until the end: a terminal that nobody has open yet reads as one that was left.
        self._slave = slave

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, *, seconds: float = 30) -> str:
        """Return what stood before `text`; what was read is gone from the screen then."""
        end = time.monotonic() + seconds
        while text not in self.screen:
            if not select.select([self._master], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} never came; the screen: {self.screen!r}")
            self.screen += os.read(self._master, 65536).decode(errors="replace")
        before, _, self.screen = self.screen.partition(text)
        return before

    def press(self, key: str, *, until: str) -> None:
        """Press a key again and again until `until` stands there: readline overlooks a signal just before it waits for one."""
        for _ in range(30):
            self.type(key)
            with contextlib.suppress(AssertionError):
                self.expect(until, seconds=1)
                return
        raise AssertionError(f"{until!r} never came")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)


@pytest.fixture
def terminal(environ: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        opened.append(Terminal(environ, *arguments))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def test_a_conversation_remembers_resets_and_leaves_by_ctrl_d(door, terminal):
    door.answers = [Answer(PARIS), Answer(PARIS), Answer(PARIS)]
    screen = terminal("--system", "Be brief.")
    screen.expect("> ")
    screen.type("France?\n")
    screen.expect("is Paris.")
    screen.expect("> ")
    screen.type("Sure?\n")
    screen.expect("is Paris.")
    assert [turn["content"] for turn in door.said()] == ["Be brief.", "France?", "The capital is Paris.", "Sure?"]
    screen.expect("> ")
    screen.type("/reset\n")
    screen.expect("anew")
    screen.expect("> ")
    screen.type("Again\\\nplease\n")
    screen.expect("is Paris.")
    assert [turn["content"] for turn in door.said()] == ["Be brief.", "Again\nplease"]
    screen.expect("> ")
    screen.type("\x04")
    assert screen.process.wait(30) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(door, terminal):
    door.answers = [Answer([chunk("Half an"), WAIT]), Answer(PARIS)]
    screen = terminal()
    screen.expect("> ")
    screen.type("Hi\n")
    screen.expect("Half an")
    assert door.waiting.wait(30)
    screen.type("\x03")
    screen.expect("(stopped)")
    assert door.left.wait(30)
    screen.expect("> ")
    screen.press("\x03", until="Ctrl-D leaves")
    screen.type("Go on\n")
    screen.expect("is Paris.")
    assert [turn["content"] for turn in door.said()] == ["Hi", "Half an", "Go on"]


def test_what_is_waited_for_is_shown_until_the_answer_begins(door, terminal):
    door.answers = [Answer([b": queued 3\n\n", WAIT])]
    screen = terminal("Hi")
    screen.expect("waiting for the answer…")
    screen.expect("queued, place 3…")


def test_an_error_is_shown_and_the_conversation_goes_on(door, terminal):
    door.answers = [Answer([json.dumps(REFUSED).encode()], status=404, content_type="application/json"), Answer(PARIS)]
    screen = terminal()
    screen.expect("> ")
    screen.type("One\n")
    screen.expect("not_found, HTTP 404")
    screen.expect("> ")
    screen.type("Two\n")
    screen.expect("is Paris.")
    assert [turn["content"] for turn in door.said()] == ["Two"]


def test_a_model_cannot_drive_the_terminal(door, terminal):
    door.answers = [Answer([chunk("a\x1b]0;owned\x07b\x1b[2Jc"), DONE])]
    screen = terminal("Hi")
    screen.expect("a]0;ownedb[2Jc")


def test_reasoning_is_shown_apart_from_the_answer(door, terminal):
    door.answers = [Answer([chunk(reasoning_content="hmm"), *PARIS])]
    screen = terminal("Hi")
    screen.expect("\x1b[2mhmm\x1b[0m")
    screen.expect("The capital is Paris.")


def test_what_was_typed_is_kept_for_the_next_time_and_for_nobody_else(door, terminal, tmp_path):
    door.answers = [Answer(PARIS)]
    screen = terminal()
    screen.expect("> ")
    screen.type("Remember me\n")
    screen.expect("is Paris.")
    screen.expect("> ")
    screen.type("/exit\n")
    assert screen.process.wait(30) == 0
    history = tmp_path / "history"
    assert "Remember me" in history.read_text(encoding="utf-8")
    assert history.stat().st_mode & 0o777 == 0o600
