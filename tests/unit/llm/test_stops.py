import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.stops import StopMatcher

short = st.text(alphabet="abc", min_size=1, max_size=4)


def expected(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first; of several completed by one piece, the earliest, then longest."""
    seen = ""
    for piece in pieces:
        seen += piece
        found = [(seen.find(stop), -len(stop), stop) for stop in stops if stop in seen]
        if found:
            at, _, stop = min(found)
            return seen[:at], stop
    return seen, None


@given(st.lists(short, max_size=12), st.lists(short, min_size=1, max_size=4))
def test_the_text_ends_before_the_first_stop_string_wherever_the_pieces_are_cut(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    shown += matcher.end()
    text, hit = expected(pieces, stops)
    assert matcher.hit == hit
    assert shown == text


@given(st.lists(short, max_size=12), st.lists(short, min_size=1, max_size=4))
def test_only_what_may_still_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.hit is not None:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_over_three_tokens_is_found_and_not_shown() -> None:
    matcher = StopMatcher(["<|end|>"])
    assert [matcher.push(piece) for piece in ("Paris.<", "|en", "d|> more")] == ["Paris.", "", ""]
    assert matcher.hit == "<|end|>"


def test_held_text_that_turns_out_harmless_is_shown_in_order() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("two") == "\ntwo"


def test_held_text_is_shown_when_the_answer_ends() -> None:
    matcher = StopMatcher(["stop!"])
    assert matcher.push("please stop") == "please "
    assert matcher.end() == "stop"
    assert matcher.hit is None


def test_nothing_follows_a_stop_string() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("ax") == "a"
    assert matcher.push("b") == ""
    assert matcher.end() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).push("anything") == "anything"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
