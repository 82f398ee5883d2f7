"""What the gRPC server end makes of bytes: messages, metadata, frames."""

import gzip
import zlib
from itertools import pairwise

import grpc
import hypothesis.strategies as st
import pytest
from hpack import Decoder
from hypothesis import given

from services.kit.wire.frames import CONTINUATION, END_HEADERS, HEADERS, LONGEST_FRAME, heading, literal, settings_in
from services.kit.wire.messages import Assembler, MessageError, enveloped
from services.kit.wire.metadata import block_of, metadata_of, status_block, timeout_s


def compressed(message: bytes) -> bytes:
    return b"\x01" + len(message).to_bytes(4, "big") + message


@given(messages=st.lists(st.binary(max_size=40), max_size=6), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_messages_are_the_same_however_the_body_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    body = b"".join(map(enveloped, messages))
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assembler, heard = Assembler(40), []
    for start, stop in pairwise(places):
        if start < stop:
            heard += assembler.feed(body[start:stop])
    assert heard == messages
    assert assembler.is_between


def test_a_message_that_is_half_there_is_known_to_be() -> None:
    assembler = Assembler(40)
    assert assembler.feed(enveloped(b"abc") + b"\0\0") == [b"abc"]
    assert not assembler.is_between


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_compressed_messages_are_opened(pack) -> None:
    assert Assembler(1_000).feed(compressed(pack(b"a" * 1_000))) == [b"a" * 1_000]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (enveloped(b"a" * 41), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (enveloped(b"a" * 41)[:7], grpc.StatusCode.RESOURCE_EXHAUSTED),
        (compressed(zlib.compress(b"a" * 41)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (compressed(b"no such thing"), grpc.StatusCode.INTERNAL),
        (compressed(zlib.compress(b"a" * 9)[:-6]), grpc.StatusCode.INTERNAL),
        (b"\x07\0\0\0\x01a", grpc.StatusCode.INTERNAL),
    ],
    ids=["too long", "says that it will be", "bomb", "not compressed", "cut off", "unknown flag"],
)
def test_what_is_no_message_is_refused_by_its_code(said: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(MessageError) as caught:
        Assembler(40).feed(said)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2H", 7200), ("3M", 180), ("5S", 5), ("250m", 0.25), ("100u", 1e-4), ("7n", 7e-9), ("99999999S", 99_999_999)],
)
def test_timeouts_are_read_in_all_their_units(text: str, seconds: float) -> None:
    assert timeout_s({"grpc-timeout": text}) == pytest.approx(seconds)


def test_who_says_no_timeout_waits_for_ever() -> None:
    assert timeout_s({}) is None


@pytest.mark.parametrize("text", ["", "5", "S", "-1S", "123456789S", "5s", "1.5S"])
def test_what_is_no_timeout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="grpc-timeout"):
        timeout_s({"grpc-timeout": text})


@given(st.dictionaries(st.from_regex(r"x-[a-z0-9._]{1,20}", fullmatch=True), st.binary(max_size=60), max_size=5))
def test_binary_metadata_comes_back_as_it_was(values: dict[str, bytes]) -> None:
    said = tuple((f"{key}-bin", value) for key, value in values.items())
    headers = {str(name): str(value) for name, value in Decoder().decode(block_of(said))}
    assert metadata_of(headers) == said


def test_what_belongs_to_the_call_is_no_metadata() -> None:
    headers = {":path": "/a/B", "te": "trailers", "content-type": "application/grpc", "grpc-timeout": "1S", "x-a": "b"}
    assert metadata_of(headers) == (("x-a", "b"),)
    with pytest.raises(ValueError, match="base64"):
        metadata_of({"x-bin": "%%%"})
    with pytest.raises(ValueError, match="no key"):
        block_of([("Upper", "case")])


def test_a_status_message_in_any_script_is_carried_in_ascii() -> None:
    block = status_block(grpc.StatusCode.NOT_FOUND, "100 % ünmöglich", [])
    headers = dict(Decoder().decode(block))
    assert headers["grpc-status"] == "5"
    assert headers["grpc-message"] == "100 %25 %C3%BCnm%C3%B6glich"


def test_headers_longer_than_a_frame_go_on_in_the_next() -> None:
    block = literal(b"x", b"y" * 40_000)
    sent, found, kinds = heading(b"\0\0\0\x01", block, is_last=True), b"", []
    while sent:
        size = int.from_bytes(sent[:3], "big")
        kinds.append((sent[3], sent[4]))
        found += sent[9 : 9 + size]
        assert size <= LONGEST_FRAME
        sent = sent[9 + size :]
    assert found == block
    assert kinds == [(HEADERS, 1), (CONTINUATION, 0), (CONTINUATION, END_HEADERS)]


def test_settings_that_are_cut_off_are_left_out() -> None:
    assert settings_in(b"\0\x04\0\0\0\x0a\0\x05") == {4: 10}
