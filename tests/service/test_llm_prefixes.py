"""Prefixes that had to leave the cache, on the real model: what comes back from host memory is what was computed."""

import pytest

from services.llm.host.llama import Model
from tests.fixtures.engine import Driver, chat, make

BUDGET = 64 * 1024 * 1024
STORIES = [chat(f"Number {place}. " + f"Tell me about the year {1900 + place}. " * 4) for place in range(3)]


def ask(driver: Driver, prompt: str) -> tuple[str, int]:
    """Return the greedy answer and how many tokens of the prompt were not computed."""
    request = driver.submit(prompt, max_tokens=6, ignore_eos=True, reuse=True)
    driver.until(lambda: (request, 0) in driver.finished)
    return driver.texts[request, 0], driver.finished[request, 0].cached_tokens


def test_a_prompt_whose_prefix_left_the_cache_is_fetched_from_host_memory(whole_model: Model) -> None:
    driver = make(whole_model, warm=1, stored_bytes=BUDGET)
    first = [ask(driver, story) for story in STORIES]
    assert driver.engine._roster.stored.used_bytes > 0
    again = [ask(driver, story) for story in STORIES]
    assert [cached for _, cached in again] == [len(driver.tokens(story)) - 1 for story in STORIES]
    assert [answer for answer, _ in again] == [answer for answer, _ in first]


def test_without_host_memory_it_is_computed_again(small_model: Model) -> None:
    driver = make(small_model, warm=1)
    for story in STORIES:
        ask(driver, story)
    _, cached = ask(driver, STORIES[0])
    assert cached < 40  # what all chats begin with


def test_an_edit_in_the_middle_fetches_what_comes_before_it(small_model: Model) -> None:
    driver = make(small_model, warm=1, stored_bytes=BUDGET)
    for story in STORIES:
        ask(driver, story)
    whole = driver.tokens(STORIES[1])
    edited = [*whole[: len(whole) // 2], *driver.tokens(" But no: "), *whole[len(whole) // 2 :]]
    request = driver.submit(edited, max_tokens=4, ignore_eos=True, reuse=True, logprobs=0)
    driver.until(lambda: (request, 0) in driver.finished)
    assert driver.finished[request, 0].cached_tokens == len(whole) // 2
    cold = driver.submit(edited, max_tokens=4, ignore_eos=True, logprobs=0)
    driver.until(lambda: (cold, 0) in driver.finished)
    first = {
        each: next(delta.logprobs[0].logprob for delta in driver.deltas if delta.request == each and delta.logprobs)
        for each in (request, cold)
    }
    assert first[request] == pytest.approx(first[cold], abs=0.2)


def test_who_asks_for_no_reuse_fetches_nothing(small_model: Model) -> None:
    driver = make(small_model, warm=1, stored_bytes=BUDGET)
    for story in STORIES:
        ask(driver, story)
    request = driver.submit(STORIES[0], max_tokens=2, ignore_eos=True)
    driver.until(lambda: (request, 0) in driver.finished)
    assert driver.finished[request, 0].cached_tokens == 0


def test_prefixes_that_come_and_go_leave_no_cells_behind(small_model: Model) -> None:
    driver = make(small_model, cells=1024, warm=3, stored_bytes=BUDGET)
    for _ in range(3):
        requests = [driver.submit(story, max_tokens=8, ignore_eos=True, reuse=True) for story in STORIES]
        driver.until(lambda requests=requests: all((request, 0) in driver.finished for request in requests))
    driver.engine._roster.forget_warm()
    assert driver.engine._roster.cells.used == 0
    assert driver.engine._roster.stored.used_bytes <= BUDGET
