"""Keys that hold every input, and caches that stay within their bounds."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.diffusion.core.options import Encoding, Format
from services.diffusion.core.teleport import (
    Cache,
    Finished,
    Inputs,
    Latents,
    derived_seed,
    latent_key,
    result_key,
    resumes_at,
)
from services.diffusion.core.wire import Sampling, Tiling

SAMPLING = Sampling(20, 7.0, None, "", "", None, None)
INPUTS = Inputs("files", "engine", "settings", "cat", "", 64, 64, SAMPLING, -1, (), (), 0.75, 0.9, 7, 42)
ENCODING = Encoding(Format.PNG, 90, 4, embeds=True)
CHANGES = {
    "model": "others",
    "engine": "newer",
    "settings": "other",
    "prompt": "cat ",
    "negative_prompt": "dog",
    "width": 72,
    "height": 72,
    "clip_skip": 2,
    "loras": (("digest", 1.0),),
    "sources": ("digest",),
    "strength": 0.76,
    "control_strength": 0.8,
    "start_step": 8,
    "seed": 43,
}


@pytest.mark.parametrize("field", Inputs.__struct_fields__)
def test_every_input_changes_both_keys(field):
    if field == "sampling":
        changed = [
            msgspec.structs.replace(SAMPLING, **{name: value})
            for name, value in {
                "steps": 21,
                "guidance": 7.1,
                "distilled_guidance": 3.5,
                "sampler": "euler",
                "scheduler": "karras",
                "eta": 0.0,
                "flow_shift": 3.0,
            }.items()
        ]
        assert len(changed) == len(Sampling.__struct_fields__)
    else:
        changed = [CHANGES[field]]
    for value in changed:
        other = msgspec.structs.replace(INPUTS, **{field: value})
        assert latent_key(other) != latent_key(INPUTS)
        assert result_key(other, None, ENCODING, "m") != result_key(INPUTS, None, ENCODING, "m")


def test_what_only_changes_the_file_changes_the_picture_s_key_alone():
    key = result_key(INPUTS, None, ENCODING, "m")
    others = {
        result_key(INPUTS, Tiling(32, 32, 0.5), ENCODING, "m"),
        result_key(INPUTS, None, ENCODING, "n"),
        *(
            result_key(INPUTS, None, dataclasses.replace(ENCODING, **change), "m")
            for change in ({"format": Format.WEBP}, {"quality": 91}, {"effort": 5}, {"embeds": False})
        ),
    }
    assert len(others) == 6
    assert key not in others


def test_a_seed_that_is_not_said_follows_from_the_rest():
    free = msgspec.structs.replace(INPUTS, seed=None)
    assert derived_seed(free) == derived_seed(free)
    assert derived_seed(free) != derived_seed(msgspec.structs.replace(free, prompt="dog"))
    assert 0 <= derived_seed(free) < 2**31


def test_a_run_resumes_at_its_last_step_at_most():
    assert resumes_at(None, 7, 20) == 7
    assert resumes_at(None, 7, 4) == 3
    assert resumes_at(50, 7, 20) == 19
    assert resumes_at(0, 7, 20) == 0


def finished(size: int) -> Finished:
    return Finished(bytes(size), 8, 8, 3, "euler", "discrete")


def test_a_picture_and_its_latents_leave_together():
    cache = Cache(1, 1000)
    cache.keep("a", "m", Latents(bytes(10), 1))
    cache.keep_result("a", "png", "m", finished(20))
    cache.keep_result("b", "png", "m", finished(20))
    assert cache.replay("a") is None
    assert cache.result("a", "png") is None
    assert cache.result("b", "png") is not None
    assert (cache.results.evictions, cache.latents.evictions) == (1, 1)


def test_what_was_used_last_leaves_last():
    cache = Cache(2, 1000)
    for key in "ab":
        cache.keep_result(key, "png", "m", finished(1))
    assert cache.result("a", "png") is not None
    cache.keep_result("c", "png", "m", finished(1))
    assert cache.has("a", "png")
    assert not cache.has("b", "png")


def test_a_model_s_entries_can_be_forgotten_alone():
    cache = Cache(9, 1000)
    cache.keep_result("a", "png", "m", finished(5))
    cache.keep_result("b", "png", "n", finished(7))
    assert cache.clear("m") == (1, 5)
    assert cache.clear(None) == (1, 7)
    assert cache.clear(None) == (0, 0)


KEEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans(), st.integers(1, 60)), max_size=60)


@given(KEEPS, st.integers(0, 5), st.integers(1, 200))
def test_whatever_is_kept_the_bounds_hold_and_the_bytes_are_counted(keeps, entries, size):
    cache = Cache(entries, size)
    for key, form, is_latent, length in keeps:
        if is_latent:
            cache.keep(str(key), "m", Latents(bytes(length), 1))
        else:
            cache.keep_result(str(key), str(form), "m", finished(length))
        (results, result_bytes), (latents, latent_bytes) = cache.sizes()
        assert result_bytes + latent_bytes <= size
        assert latents <= entries
        assert results <= 4 * entries
    held = sum(size for _, size in cache.sizes())
    assert cache.clear(None)[1] == held
