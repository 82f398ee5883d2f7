import itertools

from hypothesis import given
from hypothesis import strategies as st

from cli.sse import SseComment, SseDecoder, SseEvent

STREAM = (
    b": queued 3\n\n"
    b'data: {"a": "\xc3\xa9"}\r\n\r\n'
    b"event: error\rdata: one\rdata: two\r\r"
    b"data:no space\n\n"
    b"id: 7\nretry: 10\n\n"
    b"data: [DONE]\n\n"
)
EXPECTED = [
    SseComment("queued 3"),
    SseEvent('{"a": "é"}'),
    SseEvent("one\ntwo", "error"),
    SseEvent("no space"),
    SseEvent("[DONE]"),
]


def test_a_whole_stream_gives_its_events_and_comments_in_order():
    assert SseDecoder().feed(STREAM) == EXPECTED


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_however_a_stream_is_cut_the_events_are_the_same(cuts: list[int]):
    decoder = SseDecoder()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [item for start, end in itertools.pairwise(edges) for item in decoder.feed(STREAM[start:end])]
    assert found == EXPECTED


def test_an_event_cut_off_by_the_end_is_never_returned():
    assert SseDecoder().feed(b'data: {"half": 1}\n') == []


def test_bytes_that_are_no_utf8_do_not_stop_the_stream():
    assert SseDecoder().feed(b"data: a\xffb\n\n") == [SseEvent("a�b")]
