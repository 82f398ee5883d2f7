"""`omniserve keys` as a user runs it: what it prints, what it keeps, what it refuses."""

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.kit import keyring
from services.kit.keyring import Key, keyring_path

ROOT = Path(__file__).parents[2]
Keys = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def keys(state_dir: Path) -> Keys:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNISERVE_")}
        environ |= {"OMNISERVE_STATE_DIR": str(state_dir), "PYTHONPATH": ":".join(filter(None, [str(ROOT), *sys.path]))}
        command = [sys.executable, "-m", "cli.main", "keys", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_a_new_key_is_alone_on_standard_output_and_only_its_hash_is_kept(keys, state_dir):
    done = keys("create", "ci", "--tier", "sub")
    assert done.returncode == 0
    text = done.stdout.removesuffix("\n")
    assert re.fullmatch(r"om-[A-Za-z0-9_-]{43}", text)
    assert "from now on callers without a key are refused" in done.stderr
    assert text not in done.stderr
    path = keyring_path(state_dir)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert text not in path.read_text()
    [key] = keyring.read(path)
    assert (key.name, key.sha256, key.tier, key.expires) == ("ci", keyring.digest(text), "sub", None)


def test_the_second_key_says_nothing_of_the_first(keys):
    keys("create", "one")
    assert "first" not in keys("create", "two").stderr


def test_a_key_may_end_after_some_days(keys, state_dir):
    before = time.time()
    keys("create", "trial", "--expires", "0.5")
    [key] = keyring.read(keyring_path(state_dir))
    assert key.tier == "free"
    assert key.expires is not None
    assert before + 43_200 <= key.expires <= time.time() + 43_200


def test_the_list_shows_what_became_of_each_key_and_no_text(keys, state_dir):
    text = keys("create", "ci", "--tier", "paid").stdout.strip()
    old = Key("old", keyring.digest("x"), "free", created=1.0, expires=2.0)
    keyring.add(keyring_path(state_dir), old, now=1.5)
    keys("create", "gone")
    assert keys("revoke", "gone").returncode == 0
    done = keys("list")
    rows = {line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines()[1:]}
    assert rows == {"ci": ["paid", "active"], "old": ["free", "expired"], "gone": ["free", "revoked"]}
    assert text not in done.stdout
    listed = {each["name"]: each["state"] for each in json.loads(keys("list", "--json").stdout)}
    assert listed == {"ci": "active", "old": "expired", "gone": "revoked"}


def test_without_keys_the_list_says_how_to_make_one(keys):
    done = keys("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "omniserve keys create" in done.stdout
    assert keys("list", "--json").stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("create", "a b"), 1, "no name for a key"),
        (("create", "operator"), 1, "another kind of caller"),
        (("create", "x", "--expires", "0"), 2, "--expires is 0"),
        (("create", "x", "--tier", "gold"), 2, "gold"),
        (("revoke", "nobody"), 1, "no key 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_told(keys, arguments, code, says):
    done = keys(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_is_taken_until_its_key_is_revoked(keys):
    assert keys("create", "ci").returncode == 0
    taken = keys("create", "ci")
    assert (taken.returncode, taken.stderr.count("\n")) == (1, 1)
    keys("revoke", "ci")
    assert keys("create", "ci").returncode == 0


def test_a_damaged_keyring_is_left_as_it_is(keys, state_dir):
    state_dir.mkdir()
    keyring_path(state_dir).write_text("{")
    for command in (("list",), ("create", "x"), ("revoke", "x")):
        done = keys(*command)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "keys.json is no keyring" in done.stderr
    assert keyring_path(state_dir).read_text() == "{"
