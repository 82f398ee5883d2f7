"""Proposals from what a text said before, and when to stop making them."""

from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.speculation import Habit, Lookup, begin, learned, wanted
from services.llm.core.wire import SpeculationRules

RULES = SpeculationRules(draft=8, min_ngram=2, max_ngram=4, patience=3, probe=10)


def lookup(tokens: list[int], rules: SpeculationRules = RULES) -> Lookup:
    found = Lookup(rules)
    found.extend(tokens)
    return found


def test_what_followed_the_end_of_the_text_before_is_proposed():
    assert lookup([1, 2, 3, 4, 5, 9, 1, 2]).propose(3) == [3, 4, 5]


def test_the_longest_run_that_is_found_counts():
    assert lookup([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2]).propose(1) == [30]


def test_of_equal_runs_the_last_one_counts():
    assert lookup([1, 2, 30, 1, 2, 40, 1, 2]).propose(1) == [40]


def test_a_text_that_says_nothing_twice_has_no_proposal():
    assert lookup([1, 2, 3, 4]).propose(4) == []


def test_a_run_shorter_than_the_least_is_not_looked_up():
    assert lookup([1, 5, 1]).propose(4) == []


def test_a_text_that_repeats_itself_goes_on_repeating():
    assert lookup([5, 6, 5, 6, 5, 6]).propose(5) == [5, 6, 5, 6, 5]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 12))
def test_a_proposal_continues_an_earlier_occurrence_of_the_end(tokens: list[int], most: int):
    proposal = lookup(tokens).propose(most)
    assert len(proposal) in {0, most}
    if not proposal:
        return
    end = len(tokens)
    places = [
        place
        for size in range(RULES.min_ngram, RULES.max_ngram + 1)
        for place in range(size, end)
        if tokens[place - size : place] == tokens[end - size :]
    ]
    assert any(proposal == [tokens[place + ahead % (end - place)] for ahead in range(most)] for place in places)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_a_text_may_arrive_in_pieces(tokens: list[int]):
    whole, pieces = lookup(tokens), lookup([])
    for token in tokens:
        pieces.extend([token])
    assert whole.propose(5) == pieces.propose(5)


def test_proposals_that_are_kept_whole_get_longer_up_to_the_most():
    habit = begin(RULES)
    lengths = []
    for _ in range(4):
        lengths.append(wanted(habit, answered=0))
        habit = learned(habit, RULES, proposed=lengths[-1], kept=lengths[-1], answered=0)
    assert lengths == [2, 4, 8, 8]


def test_a_proposal_that_is_kept_in_part_sets_the_next_length():
    assert wanted(learned(Habit(8), RULES, proposed=8, kept=3, answered=50), answered=50) == 4


def test_an_answer_that_keeps_missing_gets_no_proposals_until_the_probe():
    habit = begin(RULES)
    for answered in (10, 11, 12):
        assert wanted(habit, answered=answered) > 0
        habit = learned(habit, RULES, proposed=2, kept=0, answered=answered)
    assert [wanted(habit, answered=answered) for answered in (12, 21, 22)] == [0, 0, 2]


def test_a_probe_that_misses_ends_proposals_again_at_once():
    habit = Habit(2, misses=2, quiet_until=22)
    habit = learned(habit, RULES, proposed=2, kept=0, answered=23)
    assert wanted(habit, answered=24) == 0
    assert wanted(habit, answered=33) == 2


def test_a_probe_that_hits_restores_patience():
    habit = learned(Habit(2, misses=2, quiet_until=22), RULES, proposed=2, kept=2, answered=23)
    assert habit == Habit(4)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=30))
def test_a_proposal_is_never_longer_than_the_rules_allow(history: list[tuple[int, int]]):
    habit, answered = begin(RULES), 0
    for proposed, kept in history:
        answered += 1 + min(kept, proposed)
        habit = learned(habit, RULES, proposed=proposed, kept=min(kept, proposed), answered=answered)
        assert 0 <= wanted(habit, answered=answered) <= RULES.draft
