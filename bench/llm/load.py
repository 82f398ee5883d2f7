"""The load: bursts of concurrent SSE streams from a process of its own, the same for every side.

`python -m bench.llm.load` reads one burst per line of stdin and answers each with one line of JSON. Plain sockets and one
selector, and nothing is parsed before the clock stops, so that the client costs the machine little and both sides alike.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from bench.llm.stream import Answer, parse
from bench.processes import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_PIECE = re.compile(rb'"(?:content|text)":\s*"[^"]')
END = b"data: [DONE]"
RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests to begin at one moment, each on a connection opened before it."""

    port: int
    path: str
    bodies: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One stream: seconds from the burst's start to its first piece of text and to its end, and what it said."""

    first_s: float | None
    last_s: float | None
    answer: Answer


@dataclass(frozen=True, slots=True)
class BurstResult:
    """All streams of a burst, and the CPU seconds the client itself used meanwhile."""

    streams: tuple[StreamResult, ...]
    client_cpu_s: float

    @property
    def seconds(self) -> float:
        """From the start to the end of the last stream; every stream must have ended."""
        return max(stream.last_s or 0.0 for stream in self.streams)

    @property
    def tokens(self) -> int:
        """Tokens generated, as the server counted them."""
        return sum(stream.answer.completion_tokens or 0 for stream in self.streams)

    @property
    def first_s(self) -> list[float]:
        """Seconds to the first piece of text of each stream that had one."""
        return [stream.first_s for stream in self.streams if stream.first_s is not None]

    def complaint(self, tokens: int) -> str | None:
        """Why this burst cannot be compared: None when every stream gave exactly `tokens` tokens and ended well."""
        for stream in self.streams:
            answer = stream.answer
            if answer.status != 200 or answer.error or not answer.done:
                return f"HTTP {answer.status}, {'complete' if answer.done else 'cut short'}: {answer.error}"
            if answer.completion_tokens != tokens:
                return f"{answer.completion_tokens} tokens instead of {tokens}, finish_reason {answer.finish_reason}"
        return None


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    pieces: list[bytes] = field(default_factory=list)
    tail: bytes = b""
    first_s: float | None = None
    last_s: float | None = None

    def receive(self, data: bytes, now_s: float) -> None:
        self.pieces.append(data)
        seen = self.tail + data
        if self.first_s is None and FIRST_PIECE.search(seen):
            self.first_s = now_s
        if self.last_s is None and END in seen:
            self.last_s = now_s
        self.tail = seen[-64:]


def run_burst(burst: Burst) -> BurstResult:
    """Open the connections, start the clock, send all requests, read until every stream has ended or the limit passed."""
    streams = [_Stream(socket.create_connection(("127.0.0.1", burst.port), 10)) for _ in burst.bodies]
    requests = [request_bytes(burst, body) for body in burst.bodies]
    cpu_s, start_s = time.process_time(), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for stream, request in zip(streams, requests, strict=True):
            stream.connection.sendall(request)
            stream.connection.setblocking(False)  # noqa: FBT003 - the standard library's own signature
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        while selector.get_map() and (left_s := start_s + burst.limit_s - time.perf_counter()) > 0:
            for key, _ in selector.select(left_s):
                stream = key.data
                data = _receive(stream.connection)
                if data:
                    stream.receive(data, time.perf_counter() - start_s)
                else:
                    selector.unregister(stream.connection)
    cpu_s = time.process_time() - cpu_s
    for stream in streams:
        stream.connection.close()
    return BurstResult(
        streams=tuple(StreamResult(s.first_s, s.last_s, parse(b"".join(s.pieces))) for s in streams), client_cpu_s=cpu_s
    )


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(RECEIVE_BYTES)
    except ConnectionError:
        return b""


def request_bytes(burst: Burst, body: str) -> bytes:
    """One HTTP request that asks for the connection's end with the answer's."""
    content = body.encode()
    return (
        f"POST {burst.path} HTTP/1.1\r\nHost: 127.0.0.1:{burst.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode() + content


class LoadProcess:
    """A load client running beside the bench; use as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.llm.load"],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def burst(self, *, port: int, path: str, bodies: Sequence[str], limit_s: float) -> BurstResult:
        """Run one burst and wait for its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(Burst(port, path, tuple(bodies), limit_s))) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the load client ended with {self._process.wait()}")
        return decode_result(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def decode_result(message: dict[str, Any]) -> BurstResult:
    """Inverse of `asdict` on a BurstResult."""
    streams = (StreamResult(s["first_s"], s["last_s"], Answer(**s["answer"])) for s in message["streams"])
    return BurstResult(tuple(streams), message["client_cpu_s"])


def main() -> None:
    """Serve bursts until stdin closes."""
    for line in sys.stdin:
        message = json.loads(line)
        burst = Burst(message["port"], message["path"], tuple(message["bodies"]), message["limit_s"])
        print(json.dumps(asdict(run_burst(burst))), flush=True)


if __name__ == "__main__":
    main()
