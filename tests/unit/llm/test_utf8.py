from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.llm.core.utf8 import Utf8Stream


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in pairwise(borders)]


@given(st.binary(max_size=80), st.lists(st.integers(0, 1000), max_size=20))
def test_bytes_in_any_pieces_read_as_they_do_in_one(data: bytes, cuts: list[int]) -> None:
    stream = Utf8Stream()
    text = "".join(stream.push(piece) for piece in pieces_of(data, cuts)) + stream.end()
    assert text == data.decode("utf-8", "replace")


@given(st.text(max_size=30), st.lists(st.integers(0, 1000), max_size=20))
def test_no_part_of_a_character_is_ever_shown(text: str, cuts: list[int]) -> None:
    stream = Utf8Stream()
    shown = ""
    for piece in pieces_of(text.encode("utf-8", "surrogatepass"), cuts):
        shown += stream.push(piece)
        if "\ufffd" not in text and text.isascii() is False:
            assert text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").startswith(shown)


def test_an_emoji_over_four_tokens_appears_with_its_last_byte() -> None:
    stream = Utf8Stream()
    shown = [stream.push(bytes([byte])) for byte in "😀".encode()]
    assert shown == ["", "", "", "😀"]
    assert not stream.open


def test_a_character_cut_off_by_the_end_becomes_one_replacement() -> None:
    stream = Utf8Stream()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.open
    assert stream.end() == "\ufffd"
