import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.planner import Pace, StepLimits, prefill_budget, share_prefill

LIMITS = StepLimits(batch_tokens=512, lone_tokens=512, stall_s=0.1, stall_ratio=2.5, floor_tokens=8)
remaining_lists = st.lists(st.integers(0, 3000), max_size=20)


@given(remaining_lists, st.integers(0, 2000))
def test_shares_stay_within_the_budget_and_within_what_each_prompt_needs(remaining: list[int], budget: int) -> None:
    shares = share_prefill(remaining, budget)
    assert len(shares) == len(remaining)
    assert all(0 <= share <= tokens for share, tokens in zip(shares, remaining, strict=True))
    assert sum(shares) == min(budget, sum(remaining))


@given(remaining_lists, st.integers(0, 2000))
def test_everybody_gets_an_equal_part_of_a_quarter_or_all_it_needs(remaining: list[int], budget: int) -> None:
    shares = share_prefill(remaining, budget)
    for share, tokens in zip(shares, remaining, strict=True):
        assert share >= min(tokens, budget // 4 // max(len(remaining), 1))


@given(remaining_lists, st.integers(0, 2000))
def test_who_needs_less_is_never_finished_later(remaining: list[int], budget: int) -> None:
    shares = share_prefill(remaining, budget)
    finished = [tokens for tokens, share in zip(remaining, shares, strict=True) if share == tokens]
    unfinished = [tokens for tokens, share in zip(remaining, shares, strict=True) if share < tokens]
    assert max(finished, default=0) <= min(unfinished, default=10_000)


def test_a_short_prompt_passes_a_long_one_without_stopping_it() -> None:
    assert share_prefill([1500, 20], 100) == [80, 20]
    assert share_prefill([1500, 90], 100) == [13, 87]


def test_equal_prompts_end_one_after_the_other() -> None:
    assert share_prefill([50, 50, 50], 80) == [50, 24, 6]


def test_with_nobody_decoding_prompts_take_the_whole_batch() -> None:
    pace = Pace(decode_step_s=0.01, prefill_token_s=0.005)
    assert prefill_budget(pace, LIMITS, decoding=0, prefilling=2) == 512


def test_prompts_that_come_together_are_read_in_together_and_a_lone_one_in_pieces() -> None:
    limits = StepLimits(batch_tokens=2048, lone_tokens=512)
    assert prefill_budget(Pace(), limits, decoding=0, prefilling=16) == 2048
    assert prefill_budget(Pace(), limits, decoding=0, prefilling=1) == 512


def test_beside_running_answers_a_step_may_take_the_stall_and_no_longer() -> None:
    pace = Pace(decode_step_s=0.02, prefill_token_s=0.001)
    assert prefill_budget(pace, LIMITS, decoding=4, prefilling=1) == 80


def test_slow_steps_may_be_stretched_in_proportion() -> None:
    pace = Pace(decode_step_s=0.2, prefill_token_s=0.01)
    assert prefill_budget(pace, LIMITS, decoding=16, prefilling=1) == 30


def test_where_many_wait_for_one_answer_the_one_waits_longer_but_never_long() -> None:
    pace = Pace(decode_step_s=0.01, prefill_token_s=0.002)
    budgets = [prefill_budget(pace, LIMITS, decoding=1, prefilling=waiting) for waiting in (1, 4, 15)]
    assert budgets == [45, 345, 495]


def test_a_prompt_that_comes_to_fifteen_answers_does_not_stretch_them_further() -> None:
    pace = Pace(decode_step_s=0.06, prefill_token_s=0.005)
    assert prefill_budget(pace, LIMITS, decoding=15, prefilling=1) == 18


def test_before_anything_is_known_prompts_get_the_floor() -> None:
    assert prefill_budget(Pace(), LIMITS, decoding=3, prefilling=1) == 8


@given(
    st.floats(0, 5, allow_nan=False),
    st.floats(0, 1, allow_nan=False),
    st.integers(0, 512),
    st.integers(1, 512),
)
def test_the_budget_fits_the_batch_and_prefill_never_stops(
    decode_s: float, token_s: float, decoding: int, prefilling: int
) -> None:
    budget = prefill_budget(Pace(decode_s, token_s), LIMITS, decoding=decoding, prefilling=1)
    room = 512 - decoding
    assert min(room, LIMITS.floor_tokens) <= budget <= room


def test_pace_learns_what_a_prefilled_token_costs_beside_decoding() -> None:
    pace = Pace().seen(decoded=4, prefilled=0, seconds=0.02)
    pace = pace.seen(decoded=4, prefilled=100, seconds=0.12)
    assert pace.decode_step_s == 0.02
    assert abs(pace.prefill_token_s - 0.001) < 1e-9


def test_a_mixed_step_tells_nothing_before_a_plain_one_was_seen() -> None:
    assert Pace().seen(decoded=2, prefilled=50, seconds=1.0) == Pace()


def test_before_any_step_without_prompts_was_seen_its_time_is_guessed_from_the_prompts():
    slow = Pace(decode_step_s=0.0, prefill_token_s=0.07)
    guessed_s = 9 * 0.07
    assert slow.decode_s(9) == pytest.approx(guessed_s)
    spare_s = LIMITS.stall_ratio * guessed_s - guessed_s
    assert prefill_budget(slow, LIMITS, decoding=9, prefilling=1) == int(spare_s / 0.07)


def test_a_step_is_foretold_by_what_it_goes_on_with_or_reads_in():
    pace = Pace(decode_step_s=0.03, prefill_token_s=0.002)
    assert pace.step_s(decoding=4, prompt_tokens=1000) == 0.03
    assert pace.step_s(decoding=0, prompt_tokens=1000) == pytest.approx(2.0)
