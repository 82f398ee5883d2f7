"""The graded gate, against a server of canned answers: what it lets pass, and what it does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.quality import run, text_suite, vector_suite
from bench.quality.findings import Baseline, Finding, cosine, failures, from_json, to_json, updated
from bench.quality.run import grade, main
from bench.quality.server import Server, ServerError

Answers = Callable[[httpx.Request, dict[str, Any]], Any]


def model(request: httpx.Request, body: dict[str, Any]) -> Any:
    """Answer like a good server would."""
    path = request.url.path
    if path == "/v1/models":
        entries = [("tiny", "chat"), ("vectors", "embedding")]
        return {"data": [{"id": name, "omniserve": {"kind": kind}} for name, kind in entries]}
    if path == "/v1/embeddings":
        return {"data": [{"embedding": vector_of(text)} for text in body["input"]]}
    if path == "/api/v1/feature-extraction":
        return ([0.5] * 64)[: body["num_features"]]
    if path == "/api/v1/generate":
        return [{"generated_text": " gulls cry."}]
    if path == "/v1/chat/completions":
        return chat(body)
    return None


def vector_of(text: str) -> list[float]:
    """Return the same for what means the same, as the triples have it."""
    for place, triple in enumerate(vector_suite.TRIPLES):
        if text in triple:
            return [1.0, float(place), 1.0 if text == triple[2] else 0.0]
    return [float(len(text)), 1.0, 0.0]


def chat(body: dict[str, Any]) -> Any:
    prompt = body["messages"][0]["content"]
    text = next((right for question, right in text_suite.TASKS if question == prompt), "It is as it always was.")
    reason = "stop"
    for wanted in body.get("stop", ()):
        text = text[: text.index(wanted)]
    if body.get("ignore_eos"):
        reason = "length"
    tokens = len(prompt) // 4
    cached = 0 if body.get("cache_prompt") is False else tokens - 1
    usage = {
        "prompt_tokens": tokens,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}


def server(answers: Answers = model, *, force_local: bool = False) -> Server:
    def answer(request: httpx.Request) -> httpx.Response:
        found = answers(request, json.loads(request.content or "{}"))
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)

    return Server("http://test/v1", force_local=force_local, transport=httpx.MockTransport(answer))


def without_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canned answers are not faster the second time."""
    checks = [each for each in text_suite.checks() if each[0] != "prefix_speed_up"]
    monkeypatch.setattr(text_suite, "checks", lambda: checks)


def test_a_good_server_passes_and_what_it_has_no_engine_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without_speed(monkeypatch)
    findings = grade(server(), run.SUITES, Baseline())
    assert failures(findings, Baseline()) == []
    assert {each.name for each in findings if each.score < 1} == set()
    assert not {"image_container", "audio_container"} & {each.name for each in findings}


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        ("determinism", lambda body, said, call: said["message"].update(content=str(call))),
        ("max_tokens", lambda body, said, call: said.update(finish_reason="stop")),
        ("stop", lambda body, said, call: said["message"].update(content="It is as it always was.")),
        ("reasoning", lambda body, said, call: said["message"].update(content="</think> Fourteen.")),
        ("prefix_agreement", lambda body, said, call: said["message"].update(content=str(call) * 9)),
    ],
)
def test_each_failing_is_found(check: str, wrong: Callable[[dict[str, Any], dict[str, Any], int], None]) -> None:
    calls = iter(range(100, 999))

    def answers(request: httpx.Request, body: dict[str, Any]) -> Any:
        answer = model(request, body)
        if request.url.path == "/v1/chat/completions":
            wrong(body, answer["choices"][0], next(calls))
        return answer

    finding = dict(text_suite.checks())[check](server(answers))
    assert failures([finding], Baseline()), finding


def test_vectors_that_change_in_company_or_since_the_baseline_are_found() -> None:
    def in_company(request: httpx.Request, body: dict[str, Any]) -> Any:
        if request.url.path == "/v1/models":
            return model(request, body)
        alone = len(body["input"]) == 1
        return {"data": [{"embedding": [1.0, float(alone)]} for _ in body["input"]]}

    assert failures([vector_suite.batch(server(in_company))], Baseline())
    known = updated([vector_suite.drift(server(), baseline=Baseline())], Baseline())
    assert failures([vector_suite.drift(server(), baseline=known)], known) == []
    moved = Baseline(vectors={text: [0.0, 0.0, 1.0] for text in known.vectors})
    assert failures([vector_suite.drift(server(), baseline=moved)], Baseline())


def test_a_score_below_the_baseline_is_worse_only_beyond_its_tolerance() -> None:
    baseline = Baseline({"tasks": 0.8})
    assert failures([Finding("tasks", 0.75, tolerance=0.1)], baseline) == []
    (worse,) = failures([Finding("tasks", 0.6, "wrong: two", tolerance=0.1)], baseline)
    assert worse == "tasks: 0.600, the baseline has 0.800; wrong: two"
    assert failures([Finding("new", 0.1)], baseline) == [], "nothing to compare with"


def test_a_baseline_comes_back_from_its_file_and_keeps_what_was_not_graded() -> None:
    former = Baseline({"tasks": 0.5, "stop": 1.0}, {"a": [0.1]})
    now = updated([Finding("tasks", 0.9, vectors={"b": [0.2]})], former)
    assert from_json(json.loads(json.dumps(to_json(now)))) == Baseline(
        {"tasks": 0.9, "stop": 1.0}, {"a": [0.1], "b": [0.2]}
    )
    with pytest.raises(ValueError, match="no baseline"):
        from_json([1])


def test_the_run_writes_its_baseline_and_ends_with_1_when_something_is_worse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept" / "baseline.json"
    monkeypatch.setattr(run, "Server", lambda *_, **__: server())
    arguments = ["--suite", "embedding", "--baseline", str(file)]
    assert main([*arguments, "--update-baseline"]) == 0
    assert main(arguments) == 0
    kept = json.loads(file.read_text())
    kept["vectors"] = {text: [0.0, 0.0, 1.0] for text in kept["vectors"]}
    file.write_text(json.dumps(kept))
    assert main(arguments) == 1
    assert "WORSE embedding_drift" in capsys.readouterr().out
    file.write_text("[]")
    assert main(arguments) == 2


def test_a_server_that_does_not_answer_is_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "Server", lambda *_, **__: server(lambda *_: None))
    assert main(["--suite", "llm", "--baseline", str(tmp_path / "none.json")]) == 2
    assert "/v1/chat/completions answered 404" in capsys.readouterr().err


def test_forcing_local_names_the_server_s_own_model_or_refuses() -> None:
    asked: list[str] = []

    def answers(request: httpx.Request, body: dict[str, Any]) -> Any:
        asked.append(body.get("model", ""))
        return model(request, body)

    server(answers).chat("Hi", max_tokens=1)
    server(answers, force_local=True).chat("Hi", max_tokens=1)
    assert asked == ["", "", "tiny"]
    with pytest.raises(ServerError, match="lists no chat model as its own"):
        server(lambda *_: {"data": [{"id": "gpt"}]}, force_local=True).chat("Hi", max_tokens=1)


def test_the_cosine_of_vectors_that_cannot_be_compared_is_0() -> None:
    assert cosine([1.0], [1.0, 0.0]) == cosine([0.0, 0.0], [1.0, 0.0]) == 0.0
    assert cosine([1.0, 0.0], [2.0, 0.0]) == 1.0
