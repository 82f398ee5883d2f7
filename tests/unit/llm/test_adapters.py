"""Adapters of a request: what is meant, and whose turn it is."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.kit.errors import DomainError, Reason
from services.llm.core.adapters import AskedAdapter, Turns, adapter_set
from services.llm.core.prefix import WarmPrefixes

KNOWN = ("pirate", "poet", "7")


def ask(*adapters: tuple[str, float | None]) -> tuple[tuple[str, float], ...]:
    return adapter_set([AskedAdapter(*each) for each in adapters], KNOWN)


def test_adapters_come_in_the_catalogue_s_order_whatever_the_request_s() -> None:
    assert ask(("poet", 0.5), ("pirate", None)) == (("pirate", 1.0), ("poet", 0.5))
    assert ask() == ()


def test_strength_zero_is_the_model_as_it_is() -> None:
    assert ask(("pirate", 0.0), ("poet", -0.0)) == ()


def test_a_place_stands_for_a_name_unless_a_name_says_the_same() -> None:
    assert ask(("0", 2.0)) == (("pirate", 2.0),)
    assert ask(("2", None)) == (("7", 1.0),)
    assert ask(("7", None)) == (("7", 1.0),)


@pytest.mark.parametrize(
    ("adapters", "field", "words"),
    [
        ([("sailor", None)], "options.adapters[0].name", "there are 'pirate', 'poet', '7'"),
        ([("3", None)], "options.adapters[0].name", "'3'"),
        ([("", None)], "options.adapters[0].name", "''"),
        ([("poet", 1), ("1", 1)], "options.adapters[1].name", "'poet' again"),
        ([("poet", 16.5)], "options.adapters[0].scale", "-16 to 16"),
        ([("poet", float("nan"))], "options.adapters[0].scale", "nan"),
        ([("poet", None)] * 9, "options.adapters", "at most 8"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(adapters, field: str, words: str) -> None:
    with pytest.raises(DomainError) as caught:
        ask(*adapters)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_REQUEST, field)
    assert words in caught.value.message


def test_a_model_without_adapters_says_so() -> None:
    with pytest.raises(DomainError, match="this model has none"):
        adapter_set([AskedAdapter("pirate")], ())


BASE, ONE, TWO = (), (("pirate", 1.0),), (("poet", 1.0),)


def test_a_lone_set_keeps_the_turn() -> None:
    turns = Turns(steps=2)
    assert [turns.next({ONE}) for _ in range(7)] == [ONE] * 7


def test_sets_take_turns_of_a_few_steps() -> None:
    turns = Turns(steps=3)
    order = [turns.next([BASE, ONE]) for _ in range(12)]
    assert order == [BASE] * 3 + [ONE] * 3 + [BASE] * 3 + [ONE] * 3


def test_who_leaves_gives_up_the_turn_at_once() -> None:
    turns = Turns(steps=8)
    assert turns.next([BASE, ONE]) == BASE
    assert turns.next([ONE]) == ONE


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a crowded machine everything is
@given(st.lists(st.sets(st.sampled_from([BASE, ONE, TWO]), min_size=1), min_size=1, max_size=60))
def test_nobody_present_waits_longer_than_a_turn_of_each_other(presence) -> None:
    turns, waited = Turns(steps=4), Counter()
    for present in presence:
        chosen = turns.next(present)
        assert chosen in present
        for each in (BASE, ONE, TWO):
            waited[each] = waited[each] + 1 if each in present and each != chosen else 0
            assert waited[each] <= 8


def test_nothing_is_shared_between_groups_of_warm_prefixes() -> None:
    warm = WarmPrefixes(8)
    tokens = np.arange(20, dtype=np.int32)
    assert warm.keep(1, tokens, BASE) == []
    assert warm.keep(2, tokens, ONE) == [], "the same tokens computed with other weights are something else"
    assert warm.keep(3, tokens[:10], ONE) == [3]
    assert [source.sequence for source in warm.sources(ONE)] == [2]
    assert [source.sequence for source in warm.sources(BASE)] == [1]
    assert warm.keep(4, np.arange(30, dtype=np.int32), BASE) == [1]
