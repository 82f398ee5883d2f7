"""Which file is read ahead next, and when to stop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.vram.core.warming import MOST_FILES, State, TooManyFilesError, WarmSet

PLENTY = {"total": 1000, "available": 1000}


def warm_set(**sizes: int) -> WarmSet:
    found = WarmSet(chunk_bytes=10, keep_free_percent=5)
    for name, size in sizes.items():
        found.add(name, size, "llm")
    return found


def go_on(files: WarmSet, **memory: int) -> list[tuple[str, int, int]]:
    steps = []
    while (chunk := files.next(**(PLENTY | memory))) is not None:
        steps.append((chunk.path, chunk.start, chunk.size))
        files.advised(chunk)
    return steps


def test_files_are_read_ahead_one_after_the_other_chunk_by_chunk() -> None:
    files = warm_set(a=25, b=10)
    assert go_on(files) == [("a", 0, 10), ("a", 10, 10), ("a", 20, 5), ("b", 0, 10)]
    assert [(file.state, file.advised) for file in files.files] == [(State.WARM, 25), (State.WARM, 10)]


def test_it_stops_before_the_memory_that_must_stay_free_is_touched_and_goes_on_later() -> None:
    files = warm_set(a=25)
    assert go_on(files, available=59) == []
    assert files.files[0].state is State.STOPPED_AT_FLOOR
    assert files.is_stopped
    assert go_on(files, available=60)[0] == ("a", 0, 10)
    assert not files.is_stopped


def test_a_file_that_is_named_again_is_begun_anew_and_what_was_on_its_way_counts_for_nothing() -> None:
    files = warm_set(a=25)
    first = files.next(**PLENTY)
    files.advised(first)
    second = files.next(**PLENTY)
    files.add("a", 25, "llm")
    files.advised(second)
    assert files.files[0].advised == 0
    assert len(go_on(files)) == 3


def test_a_file_that_cannot_be_read_holds_nobody_up() -> None:
    files = warm_set(a=25, b=10)
    files.failed("a", "gone")
    assert go_on(files) == [("b", 0, 10)]
    assert (files.files[0].state, files.files[0].failure) == (State.FAILED, "gone")


def test_the_set_is_bounded() -> None:
    files = warm_set(**{f"f{number}": 1 for number in range(MOST_FILES)})
    files.add("f0", 2, "llm")
    with pytest.raises(TooManyFilesError):
        files.add("one more", 1, "llm")


@given(st.lists(st.integers(1, 60), max_size=6), st.integers(0, 1000), st.integers(0, 100))
def test_whatever_happens_the_floor_is_kept_and_everything_is_read_once(sizes, available, percent) -> None:
    files = WarmSet(chunk_bytes=10, keep_free_percent=percent)
    for number, size in enumerate(sizes):
        files.add(str(number), size, "llm")
    left = available
    while (chunk := files.next(total=1000, available=left)) is not None:
        left -= chunk.size
        files.advised(chunk)
        assert left * 100 >= 1000 * percent
    assert sum(file.advised for file in files.files) == available - left
    assert all(file.advised <= file.size for file in files.files)
