"""What models were seen to take, on disk."""

import os

import pytest

from services.kit.hosts.footprints import Footprints, allocated_mib, is_alive


def test_the_most_that_was_seen_is_known_after_a_restart(tmp_path) -> None:
    before = Footprints(tmp_path / "llm")
    assert before.seen_mib("m") is None
    assert before.note("m", 100)
    assert not before.note("m", 90)
    assert before.note("m", 120)
    assert Footprints(tmp_path / "llm").seen_mib("m") == 120


@pytest.mark.parametrize("text", ["", "[", '{"m": "many"}', "[1]", '{"m": {}}'])
def test_a_file_that_cannot_be_read_is_as_good_as_none(tmp_path, text) -> None:
    (tmp_path / "footprints.json").write_text(text)
    kept = Footprints(tmp_path)
    assert kept.seen_mib("m") is None
    assert kept.note("m", 5)
    assert Footprints(tmp_path).seen_mib("m") == 5


def test_the_oldest_are_forgotten_when_there_are_too_many(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("services.kit.hosts.footprints._MOST_KEPT", 2)
    kept = Footprints(tmp_path)
    for name in ("a", "b", "c"):
        kept.note(name, 1)
    assert [kept.seen_mib(name) for name in ("a", "b", "c")] == [None, 1, 1]


def test_a_process_tells_what_it_has_allocated_until_it_is_gone() -> None:
    mine = allocated_mib(os.getpid())
    assert mine is not None
    assert mine > 1
    assert allocated_mib(2**22 + 1) is None
    assert is_alive(os.getpid())
    assert not is_alive(2**22 + 1)
