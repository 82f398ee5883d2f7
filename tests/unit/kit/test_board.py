"""Bytes passed through memory that two processes have open."""

import pytest

from services.kit.hosts.board import Board


@pytest.fixture
def board():
    made = Board.new("test")
    yield made
    made.close()


def test_what_is_put_down_is_taken_by_whoever_has_the_memory_open(board):
    first, second = board.put(b"one"), board.put(b"three")
    theirs = Board(board.descriptor)
    assert theirs.take(first, 3) == b"one"
    assert theirs.take(second, 5) == b"three"
    assert theirs.take(0, 0) == b""


def test_what_is_not_there_is_no_picture_of_zeros(board):
    board.put(b"one")
    with pytest.raises(ValueError, match="1 bytes before"):
        board.take(0, 4)


def test_after_a_clear_places_are_used_again(board):
    board.put(b"one")
    board.clear()
    with pytest.raises(ValueError, match="ends"):
        board.take(0, 1)
    assert board.put(b"two") == 0
