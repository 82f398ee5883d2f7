import contextlib

import pytest

from cli.models.gguf import GgufError, read_header

ENTRIES = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "tokenizer.ggml.tokens": ["a", "bb", "ccc"],
    "llama.context_length": 2048,
    "general.file_type": 15,
}


def test_a_header_names_the_model(tmp_path, make_gguf):
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf(ENTRIES))
    header = read_header(path)
    assert (header.architecture, header.name, header.quantisation, header.context_tokens) == (
        "llama",
        "Tiny",
        "Q4_K_M",
        2048,
    )
    assert header.size_bytes == path.stat().st_size


def test_absent_entries_are_absent(tmp_path, make_gguf):
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf())
    assert read_header(path).name is None


def test_a_file_cut_anywhere_is_refused_with_its_reason(tmp_path, make_gguf):
    whole = make_gguf(ENTRIES)
    path = tmp_path / "m.gguf"
    for length in range(0, len(whole) - 64, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut short|empty"):
            read_header(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!doctype html><html>", "web page"),
        (b"version https://git-lfs", "LFS pointer"),
        (b"PK\x03\x04zip", "begins with"),
        (b"", "empty file"),
    ],
)
def test_a_foreign_file_is_refused_by_what_it_seems_to_be(tmp_path, content, says):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=says):
        read_header(path)


def test_lengths_that_the_file_cannot_hold_are_never_believed(tmp_path, make_gguf):
    whole = bytearray(make_gguf(ENTRIES))
    whole[24:32] = b"\xff" * 8
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    with pytest.raises(GgufError):
        read_header(path)


def test_an_unknown_version_is_named(tmp_path, make_gguf):
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf(version=9))
    with pytest.raises(GgufError, match="version 9"):
        read_header(path)


def test_random_damage_never_raises_anything_else(tmp_path, make_gguf):
    whole = make_gguf(ENTRIES)
    path = tmp_path / "m.gguf"
    for position in range(0, len(whole) - 128, 3):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        with contextlib.suppress(GgufError):
            read_header(path)
