import pytest

from cli.http import describe_error, refusal
from cli.models.listing import local_models, served_row
from cli.settings import base_url
from cli.terminal import human_size, one_line, printable


def test_control_characters_never_reach_the_terminal():
    assert printable("a\x1b[31mb\x9bc\r\td\n") == "a[31mbc\td\n"


def test_any_text_becomes_one_short_line():
    assert one_line("a\n\n b\x00") == "a b"
    assert one_line("x" * 20, limit=10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98 << 20, "98.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_given_in_the_largest_fitting_unit(size, text):
    assert human_size(size) == text


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ({"message": "No.", "code": "c", "type": "t"}, "No. [c]"),
        ({"message": "No.", "reason": "queue_full", "retry_after_ms": 1}, "No. [queue_full, try again in 1 s]"),
        ({"message": "a\nb"}, "a b"),
        ({}, "no message"),
    ],
)
def test_an_error_object_is_one_line(error, line):
    assert describe_error(error) == line


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (502, b"<html>\nBad\n</html>", "502 Bad Gateway: <html> Bad </html>"),
        (503, b"", "the mesh answered 503 Service Unavailable"),
        (599, b"\xff", "599: �"),
        (400, b'{"error": "text"}', '400 Bad Request: {"error": "text"}'),
    ],
)
def test_an_answer_without_our_error_shape_is_one_line_too(status, body, line):
    assert refusal(status, body).message == line


@pytest.mark.parametrize("text", ["http://h:1", "http://h:1/", "http://h:1/v1", " http://h:1/v1/ "])
def test_an_address_may_be_written_as_sdk_users_do(text):
    assert base_url(text) == "http://h:1"


def test_a_served_model_shows_what_the_mesh_says_and_dashes_elsewhere():
    extra = {
        "kind": "chat",
        "state": "failed",
        "failure": "no memory",
        "size_mib": 94,
        "context_tokens": 0,
        "capabilities": ["tools"],
    }
    assert served_row({"id": "m", "omniserve": extra}) == (
        "m",
        "chat",
        "failed: no memory",
        "-",
        "94.0 MiB",
        "-",
        "-",
        "-",
        "tools",
    )
    assert served_row({"id": "m"}) == ("m", *["-"] * 8)


@pytest.mark.parametrize(
    ("extra", "stays"), [({"pinned": True, "ttl_ms": 5}, "pinned"), ({"ttl_ms": 1500}, "1.5 s"), ({"ttl_ms": 0}, "-")]
)
def test_a_served_model_says_how_long_it_stays_idle_in_memory(extra, stays):
    assert served_row({"id": "m", "omniserve": extra})[6] == stays


def test_local_models_are_listed_with_what_is_wrong_with_them(tmp_path, make_gguf):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.gguf").write_bytes(make_gguf({"general.name": "Tiny"}))
    (tmp_path / "a.gguf").write_bytes(b"<html>")
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "c.gguf").write_bytes(b"")
    (tmp_path / "d.gguf.part").write_bytes(b"")
    first, second = local_models(tmp_path)
    assert (first.file, first.name) == ("a.gguf", None)
    assert first.problem is not None
    assert (second.file, second.name, second.problem) == ("sub/b.gguf", "Tiny", None)


def test_a_models_folder_that_does_not_exist_is_empty(tmp_path):
    assert list(local_models(tmp_path / "none")) == []
