import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest

from services.kit.tokens import TokenBook, TokenError, ensure_token, tokens_dir


def test_a_token_is_made_once_and_stays(tmp_path):
    first = ensure_token(tmp_path, "llm")
    assert len(first) >= 32
    assert ensure_token(tmp_path, "llm") == first
    assert ensure_token(tmp_path, "admission") != first


def test_only_the_owner_can_read_a_token(tmp_path):
    former = os.umask(0)
    try:
        ensure_token(tmp_path, "llm")
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "tokens" / "llm").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tokens").stat().st_mode) == 0o700


def test_a_token_file_that_others_could_read_is_closed_again(tmp_path):
    ensure_token(tmp_path, "llm")
    (tmp_path / "tokens" / "llm").chmod(0o644)
    ensure_token(tmp_path, "llm")
    assert stat.S_IMODE((tmp_path / "tokens" / "llm").stat().st_mode) == 0o600


def _start(state_dir: Path, gate, answers) -> None:
    gate.wait()
    answers.put(ensure_token(state_dir, "llm"))


def test_processes_that_race_agree_on_one_token_and_leave_nothing_behind(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    gate, answers = spawn.Barrier(4), spawn.Queue()
    starters = [spawn.Process(target=_start, args=(tmp_path, gate, answers)) for _ in range(4)]
    for starter in starters:
        starter.start()
    tokens = {answers.get(timeout=60) for _ in starters}
    for starter in starters:
        starter.join()
    assert len(tokens) == 1
    assert [path.name for path in tokens_dir(tmp_path).iterdir()] == ["llm"]


def test_threads_that_race_agree_on_one_token(tmp_path):
    for attempt in range(20):
        gate, tokens = threading.Barrier(8), []

        def start(gate=gate, tokens=tokens, name=f"svc{attempt}"):
            gate.wait()
            tokens.append(ensure_token(tmp_path, name))

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(tokens)) == 1


@pytest.mark.parametrize("name", ["", "../llm", "LLM", "a/b", ".hidden", "a" * 64])
def test_what_is_no_service_name_never_becomes_a_path(tmp_path, name):
    with pytest.raises(ValueError, match="no service name"):
        ensure_token(tmp_path, name)


def test_a_damaged_token_file_is_refused_by_name(tmp_path):
    ensure_token(tmp_path, "llm")
    (tmp_path / "tokens" / "llm").write_text("short")
    with pytest.raises(TokenError, match="tokens/llm"):
        ensure_token(tmp_path, "llm")


def test_the_book_knows_whose_token_it_is(tmp_path):
    tokens = {name: ensure_token(tmp_path, name) for name in ("llm", "facade", "envoy-public")}
    book = TokenBook(tmp_path)
    assert {name: book.service_of(token) for name, token in tokens.items()} == {n: n for n in tokens}


def test_the_book_refuses_what_is_nobodys_token(tmp_path):
    token = ensure_token(tmp_path, "llm")
    book = TokenBook(tmp_path)
    assert book.service_of("") is None
    assert book.service_of(token[:-1]) is None
    assert book.service_of(token + "x") is None
    assert book.service_of("é" * 40) is None


def test_the_book_learns_of_a_service_that_starts_later(tmp_path):
    book = TokenBook(tmp_path)
    assert book.service_of("x" * 43) is None
    assert book.service_of(ensure_token(tmp_path, "late")) == "late"


def test_a_damaged_file_locks_out_its_own_service_only(tmp_path):
    bad, good = ensure_token(tmp_path, "bad"), ensure_token(tmp_path, "good")
    (tmp_path / "tokens" / "bad").write_text("")
    book = TokenBook(tmp_path)
    assert book.service_of(bad) is None
    assert book.service_of(good) == "good"
