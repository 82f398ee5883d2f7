"""What is said about the bursts of bench.transport."""

import pytest

from bench.transport.report import Burst, Name, added, bottlenecks, ratios, read_burst, table


def burst(per_second, *, p50_us=100, load_s=0.5, proxy_s=0.0, admission_s=0.0):
    return Burst(per_second, 1.0, load_s, p50_us, 2 * p50_us, proxy_s, admission_s)


def rounds(*rates, **more):
    return [burst(rate, **more) for rate in rates]


def test_the_line_of_the_load_generator_is_read_with_what_the_processes_spent():
    assert read_burst("1000 0 2.0 0.5 90 150 300\n", proxy_s=0.2, admission_s=0.1) == Burst(
        1000, 2.0, 0.5, 90, 300, 0.2, 0.1
    )


@pytest.mark.parametrize("line", ["1000 1 2.0 0.5 90 150 300", "0 0 2.0 0.5 0 0 0"])
def test_a_burst_with_a_bad_answer_or_none_is_no_sample(line):
    with pytest.raises(RuntimeError, match="were not 200"):
        read_burst(line, proxy_s=0, admission_s=0)


def test_a_ratio_is_of_the_same_round_and_stands_beside_its_goal():
    seen = {Name.PLAIN: rounds(1000, 2000), Name.GATED: rounds(200, 400), Name.KEYED: rounds(100, 300)}

    assert ratios(seen) == [
        "gated over plain Envoy: 0.200 [0.200-0.200] (goal 0.14)",
        "gated, keys over plain Envoy: 0.125 [0.100-0.150] (goal 0.10)",
    ]


def test_the_peers_are_compared_too_where_they_ran():
    seen = {
        Name.PLAIN: rounds(1000),
        Name.GATED: rounds(200),
        Name.KEYED: rounds(150),
        Name.LITELLM: rounds(20),
        Name.RELAY: rounds(90),
    }

    assert ratios(seen)[2:] == [
        "LiteLLM over plain Envoy: 0.020 [0.020-0.020]",
        "Python relay over plain Envoy: 0.090 [0.090-0.090]",
        "gated over LiteLLM: 10.0 [10.0-10.0] times (goal more than 5)",
        "gated, keys over LiteLLM: 7.5 [7.5-7.5] times (goal more than 5)",
    ]


def test_the_busiest_moment_of_the_load_generator_is_told_and_the_one_without_a_proxy_does_not_count():
    seen = {
        Name.DIRECT: rounds(4000, load_s=0.9),
        Name.PLAIN: rounds(1000, load_s=0.3),
        Name.GATED: rounds(100, load_s=0.2),
    }

    assert "4.0 [4.0-4.0] times" in bottlenecks(seen)
    assert "more than 0.30 of its core" in bottlenecks(seen)


def test_an_added_p50_stands_beside_plain_envoys_own_and_the_speed_of_the_machine():
    single = {Name.DIRECT: rounds(9), Name.PLAIN: rounds(8, p50_us=200), Name.GATED: rounds(7, p50_us=900)}

    assert added(single, {Name.PLAIN: rounds(5000)}) == [
        "machine: plain Envoy's own p50 is 200 [200-200] us, and it relays 5000 [5000-5000] requests/s at most",
        "gated adds 700 [700-700] us (goal less than 1,500), 4.5 [4.5-4.5] times plain Envoy's p50",
    ]


def test_the_table_says_what_a_request_costs_each_process():
    lines = table({Name.GATED: rounds(1000, proxy_s=0.3, admission_s=0.2)})

    assert " ".join(lines[1].split()) == (
        "gated 1000 [1000-1000] 100 [100-100] 200 [200-200] 300 [300-300] 200 [200-200] 0.50 [0.50-0.50]"
    )
    assert lines[1][lines[0].index("admission") :].startswith("200 [200-200]")
