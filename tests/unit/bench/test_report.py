"""From samples to the published table."""

import pytest

from bench.llm.report import compare, result, tables
from bench.llm.rounds import Sample

NAMES = ("mesh", "llama-server")


def sample(
    side: str,
    round_index: int,
    *,
    seconds: float,
    steps: int = 50,
    decode_ms: float | None = None,
    text: str = "same",
    others_cores: float = 0.25,
) -> Sample:
    return Sample(
        side=side,
        concurrency=4,
        round_index=round_index,
        seconds=seconds,
        tokens=200,
        first_s=seconds / 10,
        events=200,
        prompt_tokens=100,
        cached_tokens=10 if side == "mesh" else 0,
        steps=steps,
        decode_ms=decode_ms,
        cpu_s={"server": 0.5, "door": 0.1},
        client_cpu_s=0.01,
        others_cpu_s=seconds * others_cores,
        texts=(text,) * 4,
    )


def test_sides_are_compared_round_by_round_whatever_the_order_they_were_measured_in():
    samples = [
        sample("mesh", 0, seconds=1.0),
        sample("llama-server", 0, seconds=1.0),
        sample("llama-server", 1, seconds=4.0),
        sample("mesh", 1, seconds=2.0),
    ]

    (comparison,) = compare(samples, NAMES)

    assert (comparison.speed_ratio.least, comparison.speed_ratio.greatest) == (1.0, 2.0)
    assert comparison.tokens_per_s[0].greatest == 200.0
    assert comparison.first_ratio.least == 0.5


def test_rounds_that_other_programs_disturbed_are_counted_but_also_told_apart():
    samples = [
        sample("mesh", 0, seconds=2.0, others_cores=0.9),
        sample("llama-server", 0, seconds=1.0, others_cores=0.0),
        sample("mesh", 1, seconds=1.0, others_cores=0.01),
        sample("llama-server", 1, seconds=1.0, others_cores=0.02),
    ]

    (comparison,) = compare(samples, NAMES)

    assert comparison.speed_ratio.least == 0.5
    assert comparison.calm_ratio is not None
    assert (comparison.calm_ratio.least, comparison.calm_rounds) == (1.0, 1)
    assert "none was calm" in tables(compare(samples[:2], NAMES), NAMES)


def test_a_step_is_split_into_llama_cpp_and_the_rest_only_where_the_server_tells():
    samples = [sample("mesh", 0, seconds=1.0, decode_ms=900.0), sample("llama-server", 0, seconds=1.0)]

    ours, theirs = compare(samples, NAMES)[0].steps

    assert (ours.whole_ms, ours.decode_ms, ours.tokens_per_step) == (20.0, 18.0, 4.0)
    assert ours.outside_ms == pytest.approx(2.0)
    assert theirs.outside_ms is None


def test_cpu_is_told_per_token_and_per_process():
    (comparison,) = compare([sample("mesh", 0, seconds=1.0), sample("llama-server", 0, seconds=1.0)], NAMES)

    assert comparison.cpu_us_per_token[0] == pytest.approx({"server": 2500.0, "door": 500.0})
    assert comparison.client_us_per_token[0] == pytest.approx(50.0)


def test_the_table_states_what_could_make_the_run_unfair():
    comparisons = compare([sample("mesh", 0, seconds=1.0), sample("llama-server", 0, seconds=1.0, text="other")], NAMES)

    text = tables(comparisons, NAMES)

    assert "found warm 10% / 0%" in text
    assert "identical texts 0%" in text
    assert "other programs took 0.25 cores" in text


def test_the_result_file_holds_every_sample_but_not_the_texts():
    samples = [sample("mesh", 0, seconds=1.0), sample("llama-server", 0, seconds=1.0)]

    written = result({"slots": 16}, compare(samples, NAMES), samples)

    assert len(written["samples"]) == 2
    assert "texts" not in written["samples"][0]
    assert written["environment"] == {"slots": 16}
