"""The llm process and its engine host are killed under load: clean errors, an honest readiness, and the next request works."""

import json
import os
import signal
import threading
import time

import httpx
import pytest

LONG = {
    "messages": [{"role": "user", "content": "Count from one to a thousand, in words."}],
    "max_tokens": 2000,
    "ignore_eos": True,
    "stream": True,
}
SHORT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
}


class Stream(threading.Thread):
    """Reads one long stream to its end, whatever that is."""

    def __init__(self, mesh) -> None:
        super().__init__(daemon=True)
        self.url = f"{mesh.public_url}/v1/chat/completions"
        self.events: list[str] = []
        self.running = threading.Event()
        self.broken: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=LONG, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        if len(self.events) > 3:
                            self.running.set()
        except httpx.HTTPError as error:
            self.broken = error


def engine(mesh) -> dict:
    return httpx.get(f"{mesh.operator_url}/status", timeout=60).json()["services"]["llm"]["engines"][0]


@pytest.mark.parametrize("victim", ["llm", "host"])
def test_a_kill_ends_streams_with_an_error_and_the_next_request_works(mesh, wait_until, victim):
    streams = [Stream(mesh) for _ in range(4)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.running.wait(120)
    pid = mesh.pid("llm") if victim == "llm" else int(engine(mesh)["host_pid"])
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        stream.join(120)
        assert not stream.is_alive()
        # Either an error event is the last thing on the stream, or the connection was aborted: never a normal end.
        assert "[DONE]" not in stream.events
        if stream.broken is None:
            assert json.loads(stream.events[-1])["error"]["message"]
        assert not any('"finish_reason":"' in event for event in stream.events)
    mesh.wait_ready()
    answer = httpx.post(f"{mesh.public_url}/v1/chat/completions", json=SHORT, timeout=60)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    wait_until(lambda: int(engine(mesh)["active_sequences"]) == 0, "no sequence is left")


def test_readiness_tells_the_truth_while_llm_is_down(mesh):
    seen = []
    mesh.kill("llm")
    deadline = time.monotonic() + 200  # a start takes as long as the machine makes it
    while time.monotonic() < deadline:
        status = httpx.get(f"{mesh.public_url}/readyz", timeout=60).status_code
        seen.append(status)
        if status == 200 and 503 in seen:
            break
        time.sleep(0.02)
    assert 503 in seen
    assert seen[-1] == 200
