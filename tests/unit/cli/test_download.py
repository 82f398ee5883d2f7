import pytest

from cli.errors import CliError
from cli.models.download import (
    Append,
    Changed,
    Complete,
    Whole,
    range_headers,
    read_answer,
    validator_of,
    wait_before,
)
from cli.models.partial import Origin, PartFile

ORIGIN = Origin("http://x/m", '"v1"', 100)


def test_nothing_there_asks_for_the_whole():
    assert range_headers(0, ORIGIN) == {}


def test_a_part_asks_for_the_rest_of_the_same_version():
    assert range_headers(40, ORIGIN) == {"Range": "bytes=40-", "If-Range": '"v1"'}


def test_a_version_that_cannot_be_named_is_not_claimed():
    assert range_headers(40, Origin("http://x/m", None, 100)) == {"Range": "bytes=40-"}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"etag": '"abc"', "last-modified": "then"}, '"abc"'),
        ({"etag": 'W/"abc"', "last-modified": "then"}, "then"),
        ({"etag": 'W/"abc"'}, None),
        ({}, None),
    ],
)
def test_only_a_strong_validator_identifies_bytes(headers, expected):
    assert validator_of(headers) == expected


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (200, {"content-length": "100"}, Whole(100)),
        (200, {}, Whole(None)),
        (206, {"content-range": "bytes 40-99/100"}, Append(100)),
        (206, {"content-range": "bytes 40-99/*"}, Append(100)),
        (206, {"content-range": "bytes 0-99/100"}, Changed()),
        (206, {"content-range": "bytes 40-119/120"}, Changed()),
        (206, {}, Changed()),
        (416, {"content-range": "bytes */40"}, Complete()),
        (416, {"content-range": "bytes */39"}, Changed()),
        (416, {}, Changed()),
    ],
)
def test_an_answer_to_a_part_of_40_bytes(status, headers, expected):
    assert read_answer(status, headers, 40, ORIGIN) == expected


@pytest.mark.parametrize(
    ("tries", "retry_after", "expected"),
    [
        (1, None, 1),
        (3, None, 4),
        (9, None, 30),
        (1, "7", 7),
        (1, "900", 30),
        (1, "Thu, 01 Jan 1970 00:01:50 GMT", 10),
        (2, "soon", 2),
    ],
)
def test_the_wait_doubles_unless_the_server_says_how_long(tries, retry_after, expected):
    assert wait_before(tries, retry_after, now=100.0) == expected


def test_a_part_is_resumed_only_for_the_address_it_was_begun_from(tmp_path):
    target = tmp_path / "m.gguf"
    with PartFile(target) as part:
        part.resume("http://x/m")
        part.belongs_to(ORIGIN)
        part.write(b"abc")
    with PartFile(target) as part:
        assert part.resume("http://x/m") == ORIGIN
        assert part.size == 3
        part.write(b"d")
        assert part.finish() == "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"
    with PartFile(target) as part:
        assert part.resume("http://other/m") is None
        assert part.size == 0


def test_a_damaged_note_of_the_origin_means_starting_over(tmp_path):
    target = tmp_path / "m.gguf"
    (tmp_path / "m.gguf.part").write_bytes(b"abc")
    (tmp_path / "m.gguf.part.json").write_text('{"url": 1', encoding="utf-8")
    with PartFile(target) as part:
        assert part.resume("http://x/m") is None


def test_two_commands_never_write_to_one_part(tmp_path):
    with PartFile(tmp_path / "m.gguf"), pytest.raises(CliError, match="another command"):
        PartFile(tmp_path / "m.gguf")
