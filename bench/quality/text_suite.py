"""What an LLM server must not lose: repeatable answers, limits that hold, and answers that are right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from bench.quality.findings import Finding, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.quality.server import Server

QUESTIONS: Final = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "How many days are in a week?",
)
# A question and what a right answer has in it, in lower case; a model's size decides how many it gets.
TASKS: Final = (
    ("What is the capital of France? Answer with one word.", "paris"),
    ("What is the capital of Japan? Answer with one word.", "tokyo"),
    ("What is 2 + 3? Answer with the number only.", "5"),
    ("What is the opposite of hot? Answer with one word.", "cold"),
    ("Which planet do we live on? Answer with one word.", "earth"),
    ("How many legs does a spider have? Answer with the number only.", "8"),
    ("Translate to Spanish: good morning", "buenos d"),
    ("Which animal says meow? Answer with one word.", "cat"),
    ("What colour is the sky on a clear day? Answer with one word.", "blue"),
    ("Spell the word dog backwards.", "god"),
)
_SENTENCE: Final = (
    "The harbour keeper wrote down every ship that came in, its flag, its cargo and the name of its master. "
)
_MARKS: Final = re.compile(r"</?think>|\[/?THINK\]|</?seed:think>", re.IGNORECASE)
_ENDS: Final = re.compile(r"[.!?](?=\s+\S)")


def checks() -> Iterator[tuple[str, Callable[[Server], Finding]]]:
    """Yield the checks by name."""
    yield "determinism", determinism
    yield "prefix_agreement", prefix_agreement
    yield "prefix_speed_up", prefix_speed_up
    yield "max_tokens", max_tokens
    yield "stop", stop
    yield "max_sentences", max_sentences
    yield "reasoning", reasoning
    yield "tasks", tasks


def determinism(server: Server) -> Finding:
    """Check that greedy answers of lone requests on a cold cache are the same twice."""
    same = []
    for question in QUESTIONS:
        one, two = (server.chat(question, max_tokens=24, cache_prompt=False).text for _ in range(2))
        same.append(one == two != "")
    return Finding("determinism", share(same), f"{sum(same)} of {len(same)} answers came twice", floor=1.0)


def prefix_agreement(server: Server) -> Finding:
    """Check that an answer from a warm prefix begins like the cold one.

    Rounding may part them at a near tie, so not for ever.
    """
    alike = []
    for question in QUESTIONS:
        prompt = _SENTENCE * 12 + question
        cold = server.chat(prompt, max_tokens=16, cache_prompt=False).text
        server.chat(prompt, max_tokens=1)
        warm = server.chat(prompt, max_tokens=16).text
        common = next(
            (at for at, (a, b) in enumerate(zip(cold, warm, strict=False)) if a != b), min(len(cold), len(warm))
        )
        alike.append(common / max(len(cold), 1))
    score = sum(alike) / len(alike)
    return Finding("prefix_agreement", score, "shared beginning of cold and warm answers", floor=0.3, tolerance=0.3)


def prefix_speed_up(server: Server) -> Finding:
    """Check that a repeated long prefix is nearly all cached, and at least twice as fast.

    The score is the cached share.
    """
    prompt = _SENTENCE * 40 + "Who wrote it down?"
    cold = server.chat(prompt, max_tokens=1, cache_prompt=False)
    server.chat(prompt, max_tokens=1)
    warm = server.chat(prompt, max_tokens=1)
    faster = cold.seconds / max(warm.seconds, 1e-6)
    score = warm.cached_tokens / max(warm.prompt_tokens, 1) if faster >= 2 else 0.0
    detail = f"{warm.cached_tokens} of {warm.prompt_tokens} tokens cached, {faster:.1f} times as fast"
    return Finding("prefix_speed_up", score, detail, floor=0.9, tolerance=0.05)


def max_tokens(server: Server) -> Finding:
    """Check that a limit is met exactly and told as the reason."""
    kept = []
    for most in (1, 5, 17):
        said = server.chat("Count from one to two hundred in words.", max_tokens=most, ignore_eos=True)
        kept.append(said.completion_tokens == most and said.finish_reason == "length")
    return Finding("max_tokens", share(kept), f"{sum(kept)} of {len(kept)} limits held", floor=1.0)


def stop(server: Server) -> Finding:
    """Check that a stop string ends the answer and is not shown, wherever tokens are cut."""
    kept = []
    for question in QUESTIONS:
        whole = server.chat(question, max_tokens=24).text
        middle = len(whole) // 2
        wanted = whole[middle : middle + 3]
        said = server.chat(question, max_tokens=24, stop=[wanted])
        kept.append(bool(wanted) and said.text == whole[: whole.index(wanted)] and said.finish_reason == "stop")
    return Finding("stop", share(kept), f"{sum(kept)} of {len(kept)} stop strings obeyed", floor=0.6, tolerance=0.34)


def max_sentences(server: Server) -> Finding:
    """Check that no more sentences come than were asked for."""
    kept = []
    for most in (1, 2):
        text = server.generate("The sea is wide. The wind is cold. The", max_length=48, max_sentences=most).strip()
        kept.append(len(_ENDS.findall(text)) < most)
    return Finding("max_sentences", share(kept), f"{sum(kept)} of {len(kept)} held", floor=1.0)


def reasoning(server: Server) -> Finding:
    """Check that without thinking no mark of a thought is shown, nor in what is shown with it."""
    kept = []
    for thinking in (False, True):
        said = server.chat("How many days are in two weeks?", max_tokens=48, enable_thinking=thinking)
        kept.append(not _MARKS.search(said.text))
    return Finding("reasoning", share(kept), f"{sum(kept)} of {len(kept)} answers without marks", floor=1.0)


def tasks(server: Server) -> Finding:
    """Grade small questions. What is enough is the baseline's business: models differ."""
    wrong = [question for question, right in TASKS if right not in server.chat(question, max_tokens=24).text.lower()]
    score = 1 - len(wrong) / len(TASKS)
    return Finding("tasks", score, f"wrong: {'; '.join(wrong) or 'none'}", tolerance=0.1)
