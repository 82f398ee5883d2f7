import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.prefix import Match, Source, Stored, StoredPrefixes, WarmPrefixes, common_length, longest_match

tokens = st.lists(st.integers(0, 2), max_size=12)


def arr(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


@given(tokens, tokens)
def test_the_common_length_is_what_a_walk_finds(one: list[int], other: list[int]) -> None:
    walked = 0
    while walked < min(len(one), len(other)) and one[walked] == other[walked]:
        walked += 1
    assert common_length(arr(one), arr(other)) == walked


@given(tokens.filter(len), st.lists(tokens, max_size=5), st.integers(1, 4))
def test_the_match_is_the_longest_and_leaves_a_token_to_compute(
    prompt: list[int], others: list[list[int]], least: int
) -> None:
    sources = [Source(number, arr(each)) for number, each in enumerate(others)]
    match = longest_match(arr(prompt), sources, least=least)
    best = max([min(common_length(arr(prompt), s.tokens), len(prompt) - 1) for s in sources], default=0)
    if best < least:
        assert match is None
    else:
        assert match is not None
        assert match.length == best < len(prompt)


def test_the_same_prompt_again_shares_all_but_its_last_token() -> None:
    warm = [Source(3, arr([1, 2, 3, 4]))]
    assert longest_match(arr([1, 2, 3, 4]), warm, least=1) == Match(3, 3)


def test_the_least_recently_used_goes_first() -> None:
    warm = WarmPrefixes(2)
    assert warm.keep(0, arr([1, 1])) == []
    assert warm.keep(1, arr([2, 2])) == []
    warm.touch(0)
    assert not warm.too_many
    assert warm.keep(2, arr([3, 3])) == []
    assert warm.too_many
    assert warm.drop_oldest()[0].sequence == 1
    assert not warm.too_many
    assert [source.sequence for source in warm.sources()] == [2, 0]


def test_a_longer_sequence_replaces_its_own_beginning() -> None:
    warm = WarmPrefixes(4)
    warm.keep(0, arr([1, 2]))
    assert warm.keep(1, arr([1, 2, 3])) == [0]
    assert 0 not in warm
    assert 1 in warm


def test_a_beginning_of_what_is_kept_is_not_kept_again() -> None:
    warm = WarmPrefixes(4)
    warm.keep(0, arr([1, 2, 3]))
    assert warm.keep(1, arr([1, 2])) == [1]
    assert len(warm) == 1


def test_turned_off_it_keeps_nothing() -> None:
    warm = WarmPrefixes(0)
    assert warm.keep(7, arr([1, 2])) == [7]
    with pytest.raises(KeyError):
        warm.drop_oldest()


def stored(*prefixes: list[int], most_bytes: int = 100, size: int = 30) -> StoredPrefixes:
    found = StoredPrefixes(most_bytes)
    for tokens in prefixes:
        found.keep(Stored(arr(tokens), bytes(size)))
    return found


def test_host_memory_gives_back_the_longest_beginning() -> None:
    match = stored([1, 2, 9], [1, 2, 3, 4], [7, 7]).match(arr([1, 2, 3, 5, 6]), least=2)
    assert match is not None
    assert (match[0].tokens.tolist(), match[1]) == ([1, 2, 3, 4], 3)


def test_host_memory_never_gives_a_whole_prompt_nor_too_little() -> None:
    found = stored([1, 2, 3])
    match = found.match(arr([1, 2, 3]), least=2)
    assert match is not None
    assert match[1] == 2
    assert found.match(arr([1, 2, 3]), least=3) is None


def test_host_memory_drops_the_least_recently_used_when_full() -> None:
    found = stored([1, 1], [2, 2], [3, 3])
    assert found.match(arr([1, 1, 1]), least=1) is not None
    found.keep(Stored(arr([4, 4]), bytes(30)))
    assert found.match(arr([2, 2, 2]), least=1) is None
    assert found.match(arr([1, 1, 1]), least=1) is not None


def test_host_memory_keeps_the_longer_of_two_that_begin_alike() -> None:
    found = stored([1, 2], [1, 2, 3], [1])
    assert len(found) == 1
    assert found.used_bytes == 30


def test_host_memory_gives_nothing_to_another_group() -> None:
    found = StoredPrefixes(100)
    found.keep(Stored(arr([1, 2, 3]), bytes(30), "one"))
    assert found.match(arr([1, 2, 3, 4]), "other", least=1) is None
    found.keep(Stored(arr([1, 2]), bytes(30), "other"))
    assert len(found) == 2
    match = found.match(arr([1, 2, 3, 4]), "other", least=1)
    assert match is not None
    assert match[1] == 2


def test_what_is_larger_than_the_budget_is_not_stored() -> None:
    found = stored([1, 2])
    found.keep(Stored(arr([5, 5]), bytes(101)))
    assert (len(found), found.used_bytes) == (1, 30)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 60)), max_size=30))
def test_host_memory_never_holds_more_than_its_budget(prefixes: list[tuple[list[int], int]]) -> None:
    found = StoredPrefixes(100)
    for tokens, size in prefixes:
        found.keep(Stored(arr(tokens), bytes(size)))
        assert found.used_bytes <= 100
