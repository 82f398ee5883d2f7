"""What of a conversation is left out when the context has no room for all of it.

A conversation is cut before a user's message only, so that no answer stands without its question and no result of a
function without its call. Messages of the system and of the developer stay, whatever is cut.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from services.llm.core.prompt import Turn

_RULES: Final = ("system", "developer")
_ANSWER_SHARE: Final = 4


def room_wanted(max_tokens: int | None, context_tokens: int) -> int:
    """Return the tokens that an answer should find free: what it may have at most, but no more than a quarter of the context."""
    share = max(1, context_tokens // _ANSWER_SHARE)
    return share if max_tokens is None else max(1, min(max_tokens, share))


def cuts(turns: Sequence[Turn]) -> list[int]:
    """Return the places before which a conversation may be cut, the oldest first."""
    said = [place for place, turn in enumerate(turns) if turn.role not in _RULES]
    return [place for place in said[1:] if turns[place].role == "user"]


def cut(turns: Sequence[Turn], place: int) -> tuple[Turn, ...]:
    """Return the turns from a place on, and before them what stays in any case."""
    return (*(turn for turn in turns[:place] if turn.role in _RULES), *turns[place:])


async def first_fit(places: Sequence[int], fits: Callable[[int], Awaitable[bool]]) -> int:
    """Return the first place that fits, or the last one when none does; whatever is cut later is no longer.

    Asks for few of them, since each means a prompt that is rendered and counted. Raises ValueError without a place.
    """
    if not places:
        raise ValueError("there is no place to cut at")
    low, high = 0, len(places) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(places[middle]):
            high = middle
        else:
            low = middle + 1
    return places[low]
