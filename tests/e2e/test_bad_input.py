"""Bad input through the whole mesh: always a clear 4xx in OpenAI's shape that names the field; never a 500 or a hang."""

import contextlib
import http.client
import json
from urllib.parse import urlsplit

import httpx
import pytest

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def body(**fields: object) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


CASES = {
    "empty body": (CHAT, b"", 400, None),
    "cut off JSON": (CHAT, b'{"messages": [', 400, None),
    "a list instead of an object": (CHAT, b"[]", 400, None),
    "not UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, None),
    "no messages": (CHAT, b"{}", 400, "messages"),
    "empty messages": (CHAT, b'{"messages": []}', 400, "messages"),
    "messages of the wrong type": (CHAT, b'{"messages": "hello"}', 400, "messages"),
    "a role nobody knows": (CHAT, b'{"messages": [{"role": "wizard", "content": "x"}]}', 400, "messages[0].role"),
    "content of the wrong type": (CHAT, b'{"messages": [{"role": "user", "content": 7}]}', 400, "messages[0].content"),
    "a model of the wrong type": (CHAT, body(model=7), 400, "model"),
    "an unknown model": (CHAT, body(model="no-such-model"), 404, "model"),
    "a negative max_tokens": (CHAT, body(max_tokens=-1), 400, "max_tokens"),
    "an absurd max_tokens": (CHAT, body(max_tokens=10**30), 400, "max_tokens"),
    "a boolean max_tokens": (CHAT, body(max_tokens=True), 400, "max_tokens"),
    "a temperature as text": (CHAT, body(temperature="hot"), 400, "temperature"),
    "a temperature out of range": (CHAT, body(temperature=-1), 400, "temperature"),
    "NaN": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, None),
    "an infinite number": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400, None),
    "a top_p out of range": (CHAT, body(top_p=2), 400, "top_p"),
    "too many choices": (CHAT, body(n=1000), 400, "n"),
    "no choice": (CHAT, body(n=0), 400, "n"),
    "a stream flag as text": (CHAT, body(stream="yes"), 400, "stream"),
    "a stop of the wrong type": (CHAT, body(stop=7), 400, "stop"),
    "a prompt longer than the context": (
        CHAT,
        body(messages=[{"role": "user", "content": "word " * 20000}]),
        400,
        "messages",
    ),
    "no prompt": ("/v1/completions", b"{}", 400, "prompt"),
    "a prompt of the wrong type": ("/v1/completions", b'{"prompt": {"a": 1}}', 400, "prompt"),
    "a token outside the vocabulary": ("/v1/completions", b'{"prompt": [1, 99999999]}', 400, "prompt"),
    "deeply nested JSON": (CHAT, b'{"messages":' + b"[" * 20000 + b"]" * 20000 + b"}", 400, None),
    "tokens of the wrong type": ("/detokenize", b'{"tokens": ["a"]}', 400, "tokens"),
    "a response to nothing": ("/v1/responses", b"{}", 400, "input"),
    "a response in the background": ("/v1/responses", b'{"input": "x", "background": true}', 400, "background"),
    "a response after one nobody knows": (
        "/v1/responses",
        b'{"input": "x", "previous_response_id": "resp_0"}',
        404,
        "previous_response_id",
    ),
    "an id of no response": (
        "/v1/responses",
        b'{"input": "x", "previous_response_id": "a b"}',
        400,
        "previous_response_id",
    ),
    "no text to go on from": ("/api/v1/generate", b"{}", 400, "text"),
    "too many results": ("/api/v1/generate", b'{"text": "x", "number_of_results": 99}', 400, "number_of_results"),
    "a route nobody knows": ("/v1/nothing", b"{}", 404, None),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_clearly(mesh, case):
    path, content, status, field = CASES[case]
    answer = httpx.post(
        f"{mesh.public_url}{path}", content=content, headers={"content-type": "application/json"}, timeout=30
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    assert error["request_id"] == answer.headers["x-request-id"]
    if field:
        assert error["param"].split("[")[0].split(".")[0] == field.split("[")[0]
        assert error["param"] == field or field.count("[") == 0


def test_an_over_long_prompt_is_refused_with_both_numbers(mesh):
    answer = httpx.post(
        f"{mesh.public_url}{CHAT}", content=body(messages=[{"role": "user", "content": "word " * 20000}]), timeout=30
    )
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    numbers = [int(part) for part in error["message"].replace(",", "").replace(".", " ").split() if part.isdigit()]
    assert len(numbers) >= 2
    assert max(numbers) > 20000


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
def test_a_body_over_the_limit_is_a_413(mesh, chunked):
    address = urlsplit(mesh.public_url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    piece = b" " * (1 << 20)

    def pieces():
        for _ in range(100):
            yield piece

    headers = {"content-type": "application/json"}
    if not chunked:
        headers["content-length"] = str(100 << 20)
    # The answer may come, and the connection close, before the whole body was sent.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", CHAT, body=pieces(), headers=headers, encode_chunked=chunked)
    answer = connection.getresponse()
    assert answer.status == 413
    assert "80" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_a_method_that_a_route_does_not_have_is_a_405(mesh):
    answer = httpx.get(f"{mesh.public_url}{CHAT}", timeout=30)
    assert answer.status_code == 405
    assert answer.json()["error"]["message"]
