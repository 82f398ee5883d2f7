"""Reading what a server streamed."""

import json

from bench.llm.stream import dechunk, parse


def answer(*events: str, chunked: bool = True, status: str = "200 OK") -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\n"
    if not chunked:
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    middle = len(body) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:middle], body[middle:]))
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


def chat(content: str | None, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]})


def test_a_whole_stream_gives_its_text_its_counts_and_its_end():
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    raw = answer(chat(None), chat("Hel"), chat("lo", "length"), json.dumps({"choices": [], "usage": usage}), "[DONE]")

    got = parse(raw)

    assert (got.status, got.text, got.finish_reason, got.done, got.error) == (200, "Hello", "length", True, None)
    assert (got.prompt_tokens, got.cached_tokens, got.completion_tokens) == (9, 4, 2)
    assert got.events == 4


def test_a_stream_cut_short_is_not_done():
    raw = answer(chat("Hel"), chat("lo"))

    assert parse(raw[: raw.rindex(b"0\r\n")]).done is False


def test_an_error_event_is_reported_as_an_error():
    got = parse(answer(chat("Hel"), json.dumps({"error": {"message": "engine failed"}})))

    assert got.error is not None
    assert "engine failed" in got.error
    assert not got.done


def test_a_refusal_keeps_its_status_and_its_body():
    got = parse(answer('{"error": {"message": "no such model"}}', chunked=False, status="404 Not Found"))

    assert got.status == 404
    assert got.error is not None
    assert "no such model" in got.error


def test_completions_give_their_text_too():
    assert (
        parse(answer(json.dumps({"choices": [{"text": "a"}]}), json.dumps({"choices": [{"text": "b"}]}))).text == "ab"
    )


def test_no_answer_at_all_has_status_0():
    assert parse(b"").status == 0


def test_chunks_may_end_anywhere_even_within_a_character():
    text = "né".encode()

    assert dechunk(b"2\r\n" + text[:2] + b"\r\n1\r\n" + text[2:] + b"\r\n0\r\n\r\n") == text
