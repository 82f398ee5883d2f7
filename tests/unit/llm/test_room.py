from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.room import Claim, comes_back, gives_way

claims = st.lists(st.builds(Claim, st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=12)


@given(claims)
def test_the_newest_of_the_lowest_tier_gives_way(found: list[Claim]) -> None:
    loser = found[gives_way(found)]
    lowest = [claim for claim in found if claim.rank == min(each.rank for each in found)]
    assert loser == max(lowest, key=lambda claim: claim.arrival)


@given(claims)
def test_the_oldest_of_the_highest_tier_comes_back_first(found: list[Claim]) -> None:
    winner = found[comes_back(found)]
    highest = [claim for claim in found if claim.rank == max(each.rank for each in found)]
    assert winner == min(highest, key=lambda claim: claim.arrival)
