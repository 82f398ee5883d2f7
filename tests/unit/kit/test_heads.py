"""Heads of calls are found by their bytes, whatever trace each carries."""

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.heads import untraced

HEAD = ((":method", "POST"), (":path", "/a.B/C"), ("x-omniserve-service-token", "right"))
TRACES = st.text("0123456789abcdef-", min_size=1, max_size=60)


def encode(*headers, huffman=True):
    encoder = Encoder()
    encoder.header_table_size = 0
    return encoder.encode(headers, huffman=huffman)


def decode(block):
    return [(str(name), str(value)) for name, value in Decoder().decode(block)]


@given(TRACES, TRACES, st.booleans())
def test_heads_that_differ_in_their_trace_alone_have_one_key(one, other, huffman):
    heads = [encode(*HEAD, ("traceparent", trace), ("te", "trailers"), huffman=huffman) for trace in (one, other)]

    assert untraced(heads[0]) == untraced(heads[1])
    assert dict(decode(untraced(heads[0]))) == {**dict(HEAD), "traceparent": "", "te": "trailers"}


def test_heads_that_differ_in_anything_else_have_keys_of_their_own():
    wrong = [(name, "wrong" if "token" in name else value) for name, value in HEAD]

    assert untraced(encode(*HEAD, ("traceparent", "1"))) != untraced(encode(*wrong, ("traceparent", "1")))


@pytest.mark.parametrize("huffman", [True, False])
def test_a_head_without_a_trace_is_its_own_key(huffman):
    assert untraced(encode(*HEAD, huffman=huffman)) == encode(*HEAD, huffman=huffman)


def test_a_head_that_ends_within_its_trace_is_left_to_whoever_decodes_it():
    whole = encode(*HEAD, ("traceparent", "0" * 55))

    for size in range(len(whole)):
        untraced(whole[:size])


def test_a_trace_longer_than_any_is_not_cut():
    head = encode(*HEAD, ("traceparent", "0" * 500))

    assert untraced(head) == head
