"""Encoded prompts: what may be recalled for what, and what is known of those that hosts keep."""

import msgspec

from services.diffusion.core.conditions import KeptPrompts, prompt_context
from services.diffusion.core.wire import Generate, Prompts, Region, Sampling

JOB = Generate(1, "a fox", "", 64, 64, Sampling(4, 1.0, None, "", "", None, None), 7, 1)
PICTURE = Region(0, 2, 1, 3)


def changed(**more) -> Generate:
    return msgspec.structs.replace(JOB, **more)


def test_what_may_change_an_encoded_prompt_changes_its_context():
    contexts = [
        prompt_context(JOB, ()),
        prompt_context(changed(width=128), ()),
        prompt_context(changed(height=128), ()),
        prompt_context(changed(clip_skip=2), ()),
        prompt_context(changed(start=PICTURE), (b"123456",)),
        prompt_context(changed(start=PICTURE), (b"123457",)),
        prompt_context(changed(references=(PICTURE,)), (b"123456",)),
        prompt_context(changed(mask=PICTURE), (b"123456",)),
        prompt_context(changed(control=PICTURE), (b"123456",)),
    ]
    assert len(set(contexts)) == len(contexts)


def test_seed_and_sampling_leave_a_context_as_it_is():
    other = changed(job=2, seed=8, count=3, sampling=Sampling(20, 3.0, None, "heun", "", None, None), previews=2)
    assert prompt_context(other, ()) == prompt_context(JOB, ())


def test_with_an_adapter_there_is_no_context():
    assert prompt_context(changed(loras=(("one.safetensors", 0.5),)), ()) == b""


def said(entries: int, clears: int = 0, **more: int) -> Prompts:
    return Prompts(
        **{"encoded": 1, "recalled": 2, "evicted": 0, **more}, entries=entries, size_bytes=entries * 10, clears=clears
    )


def test_a_host_takes_what_it_keeps_along_and_what_was_found_stays_counted():
    kept = KeptPrompts()
    kept.learn(said(3), host=100)
    assert kept.held(100) == (3, 30)
    assert kept.held(None) == (0, 0)
    kept.learn(said(1, evicted=1), host=101)
    assert kept.held(101) == (1, 10)
    assert (kept.hits, kept.misses, kept.evictions) == (4, 2, 1)


def test_what_was_said_before_a_clear_was_heard_of_does_not_bring_entries_back():
    kept = KeptPrompts()
    kept.learn(said(3), host=100)
    assert kept.clear(100) == (3, 30)
    kept.learn(said(4), host=100)
    assert kept.held(100) == (0, 0)
    kept.learn(said(1, clears=1), host=100)
    assert kept.held(100) == (1, 10)
    assert kept.clear(101) == (0, 0)
