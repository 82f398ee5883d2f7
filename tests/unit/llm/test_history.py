"""What of a conversation is left out when it is too long."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.history import cut, cuts, first_fit, room_wanted
from services.llm.core.prompt import Turn

ROLES = st.lists(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), max_size=12)


def talk(*roles: str) -> tuple[Turn, ...]:
    return tuple(Turn(role, (str(place),)) for place, role in enumerate(roles))


def test_a_conversation_is_cut_before_a_users_message_only():
    turns = talk("system", "user", "assistant", "tool", "assistant", "user", "assistant", "user")
    assert cuts(turns) == [5, 7]
    assert [turn.role for turn in cut(turns, 5)] == ["system", "user", "assistant", "user"]
    assert [turn.texts for turn in cut(turns, 7)] == [("0",), ("7",)]


@pytest.mark.parametrize("roles", [(), ("user",), ("system", "user"), ("system", "user", "assistant", "tool")])
def test_one_question_cannot_be_cut(roles):
    assert cuts(talk(*roles)) == []


@given(ROLES)
def test_rules_and_the_last_question_stay_in_their_order_wherever_it_is_cut(roles):
    turns = talk(*roles)
    asked = [place for place, role in enumerate(roles) if role == "user"]
    for place in cuts(turns):
        left = cut(turns, place)
        assert [turn for turn in left if turn.role in ("system", "developer")] == [
            turn for turn in turns if turn.role in ("system", "developer")
        ]
        assert left[-(len(turns) - asked[-1]) :] == turns[asked[-1] :]
        assert list(left) == sorted(left, key=lambda turn: int(turn.texts[0]))
        assert len(left) < len(turns)


@given(st.integers(1, 500), st.integers(0, 600))
def test_the_least_that_must_go_goes_and_few_are_asked(count, limit):
    asked = []

    async def fits(place):
        asked.append(place)
        return count - place <= limit

    found = asyncio.run(first_fit(range(count), fits))
    assert found == min(max(0, count - limit), count - 1)
    assert len(asked) <= count.bit_length()


def test_without_a_place_there_is_no_fit():
    async def fits(_place):
        return True

    with pytest.raises(ValueError, match="no place"):
        asyncio.run(first_fit([], fits))


@pytest.mark.parametrize(
    ("max_tokens", "context", "room"), [(None, 4096, 1024), (100, 4096, 100), (3000, 4096, 1024), (7, 2, 1)]
)
def test_an_answer_wants_what_it_may_have_but_no_more_than_a_quarter(max_tokens, context, room):
    assert room_wanted(max_tokens, context) == room
