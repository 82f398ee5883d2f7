"""A limit of sentences: where the text ends, wherever its pieces are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.sentences import SentenceLimit


def limited(text: str, sentences: int) -> tuple[str, bool]:
    limit = SentenceLimit(sentences)
    return limit.push(text), limit.hit


@pytest.mark.parametrize(
    ("text", "sentences", "shown"),
    [
        ("Paris is big. It is old. It is far.", 1, "Paris is big."),
        ("Paris is big. It is old. It is far.", 2, "Paris is big. It is old."),
        ("Really?! Yes.", 1, "Really?!"),
        ("Wait... what? No.", 2, "Wait... what?"),
        ('He said "Go." Then he went.', 1, 'He said "Go."'),
        ("(It rained.) Then it stopped.", 1, "(It rained.)"),
        ("One.\nTwo.", 1, "One."),
        ("Is it? No. It is not.", 2, "Is it? No."),
        ("So do I. You too.", 1, "So do I."),
    ],
)
def test_the_text_ends_with_its_last_sentence(text, sentences, shown):
    assert limited(text, sentences) == (shown, True)


@pytest.mark.parametrize(
    "text",
    [
        "Pi is about 3.14 and e is 2.72 or so",
        "Dr. Smith and Mrs. Jones met",
        "Use tools, e.g. a hammer, i.e. that thing",
        "J. R. R. Tolkien wrote it in the U.S. and the U.K. both",
        "See www.example.com or file.txt now",
        "1. Buy milk\n2. Sell milk\n  a. slowly",
        "It opens at 9 a.m. and closes",
        '"Dr. No" is a film',
    ],
)
def test_stops_inside_numbers_names_and_abbreviations_end_nothing(text):
    assert limited(text, 1) == (text, False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("東京は大きい。人が多い。", "東京は大きい。"),
        ("本当？！はい。", "本当？！"),
        ("彼は「行く。」と言った。", "彼は「行く。」"),
        ("यह अच्छा है। वह नहीं।", "यह अच्छा है।"),
    ],
)
def test_scripts_without_white_space_between_sentences_count_too(text, shown):
    assert limited(text, 1) == (shown, True)


def test_an_end_is_known_with_the_next_character_and_nothing_is_held_back():
    limit = SentenceLimit(1)
    assert limit.push("Yes.") == "Yes."
    assert not limit.hit
    assert limit.push(" And more") == ""
    assert limit.hit
    assert limit.push("and more") == ""


def test_a_limit_of_no_sentences_is_refused():
    with pytest.raises(ValueError, match="no sentences"):
        SentenceLimit(0)


@given(st.lists(st.text(alphabet='aI1 .!?"。」\n', max_size=5), max_size=20), st.integers(1, 4))
def test_it_does_not_matter_where_the_pieces_are_cut(pieces, sentences):
    cut = SentenceLimit(sentences)
    shown = "".join(cut.push(piece) for piece in pieces)
    assert (shown, cut.hit) == limited("".join(pieces), sentences)


@given(st.text(alphabet='aI1 .!?"。」\n', max_size=60), st.integers(1, 4))
def test_what_is_shown_is_a_beginning_and_all_of_it_without_a_hit(text, sentences):
    shown, hit = limited(text, sentences)
    assert text.startswith(shown)
    assert hit or shown == text
    if hit:
        assert limited(shown, sentences) == (shown, False)
