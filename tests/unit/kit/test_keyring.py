import json
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.kit import access, keyring
from services.kit.config import ConfigError, parse, read
from services.kit.keyring import Key, KeyringError

NOW = 1_800_000_000.0
DIGEST = keyring.digest("om-x")


def key(name: str, **more: object) -> Key:
    return Key(name, keyring.digest(name), "free", created=NOW, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return keyring.keyring_path(tmp_path / "state")


def test_tiers_are_those_of_the_mesh():
    assert keyring.TIERS == access.TIERS


def test_a_new_text_is_long_and_url_safe_and_never_the_same():
    texts = {keyring.new_text() for _ in range(100)}
    assert len(texts) == 100
    assert all(text.startswith("om-") and len(text) == 46 for text in texts)
    assert all(set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") for text in texts)


def test_before_the_first_key_there_is_nothing_to_read(path):
    assert keyring.read(path) == ()
    assert keyring.version(path) is None


def test_what_is_added_is_read_back_and_only_its_owner_can_read_the_file(path):
    keyring.add(path, key("ci", expires=NOW + 5), now=NOW)
    keyring.add(path, key("app"), now=NOW)
    assert keyring.read(path) == (key("ci", expires=NOW + 5), key("app"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_each_change_is_a_new_version(path):
    seen = set()
    keyring.add(path, key("ci"), now=NOW)
    seen.add(keyring.version(path))
    keyring.add(path, key("app"), now=NOW)
    seen.add(keyring.version(path))
    keyring.revoke(path, "ci", now=NOW)
    seen.add(keyring.version(path))
    assert len(seen) == 3


def test_an_active_name_is_taken_until_it_is_revoked_or_over(path):
    keyring.add(path, key("ci", expires=NOW + 5), now=NOW)
    with pytest.raises(KeyringError, match="'ci' already"):
        keyring.add(path, key("ci"), now=NOW)
    keyring.add(path, key("ci"), now=NOW + 5)
    keyring.revoke(path, "ci", now=NOW + 6)
    keyring.add(path, key("ci"), now=NOW + 7)
    assert [each.revoked for each in keyring.read(path)] == [NOW + 6, NOW + 6, None]


def test_revoking_names_what_there_is(path):
    with pytest.raises(KeyringError, match="there is none"):
        keyring.revoke(path, "ci", now=NOW)
    keyring.add(path, key("app"), now=NOW)
    with pytest.raises(KeyringError, match="there are: app"):
        keyring.revoke(path, "ci", now=NOW)


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a" * 65, "a,b", "a\n"])
def test_a_name_is_something_that_a_header_and_a_log_can_carry(path, name):
    with pytest.raises(KeyringError, match="is no name"):
        keyring.add(path, key(name), now=NOW)


@pytest.mark.parametrize("name", ["anonymous", "operator", "shared", "facade", "envoy-public"])
def test_a_key_cannot_pass_for_another_kind_of_caller(path, name):
    with pytest.raises(KeyringError, match="another kind of caller"):
        keyring.add(path, key(name), now=NOW)


def test_writers_at_the_same_time_lose_no_key(path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: keyring.add(path, key(f"k{number}"), now=NOW), range(40)))
    assert {each.name for each in keyring.read(path)} == {f"k{number}" for number in range(40)}
    assert sorted(each.name for each in path.parent.iterdir()) == [".keys.json.lock", "keys.json"]


def test_a_writer_that_was_killed_midway_leaves_nothing_that_matters(path):
    keyring.add(path, key("ci"), now=NOW)
    for part in (path.with_name(f".keys.json.{number}.part") for number in range(3)):
        part.write_text("{")
    keyring.add(path, key("app"), now=NOW)
    assert len(keyring.read(path)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"keys": 3}',
        '{"keys": [{"name": "a"}]}',
        json.dumps({"keys": [{"name": "a", "sha256": "00", "tier": "free"}]}),
        json.dumps({"keys": [{"name": "a", "sha256": DIGEST, "tier": "gold"}]}),
        json.dumps({"keys": [{"name": "a", "sha256": DIGEST, "tier": "free", "expires": "soon"}]}),
        json.dumps({"keys": [{"name": "a", "sha256": DIGEST, "tier": "free", "colour": "red"}]}),
    ],
)
def test_a_damaged_keyring_is_an_error_that_names_it_and_is_not_overwritten(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(KeyringError, match=r"keys\.json"):
        keyring.read(path)
    with pytest.raises(KeyringError):
        keyring.add(path, key("ci"), now=NOW)
    assert path.read_text() == text


def test_a_key_is_active_until_its_end():
    assert key("a").is_active(NOW)
    assert key("a", expires=NOW + 1).is_active(NOW)
    assert not key("a", expires=NOW).is_active(NOW)
    assert not key("a", revoked=NOW - 1).is_active(NOW)


def keys_of(text: str) -> tuple[Key, ...]:
    return keyring.keys_in(parse(text, "omniserve.yaml"))


def test_keys_of_the_configuration_have_a_name_a_digest_a_tier_and_perhaps_an_end():
    text = f"""
keys:
  - {{name: app, sha256: {DIGEST.upper()}, tier: paid}}
  - {{name: day, sha256: "{"1" * 64}", tier: sub, expires: 2027-01-31}}
  - {{name: moment, sha256: "{"2" * 64}", tier: sub, expires: 2027-01-31T12:00:00+02:00}}
  - {{name: quoted, sha256: "{"3" * 64}", tier: sub, expires: "2027-01-31"}}
  - {{name: naive, sha256: "{"4" * 64}", tier: sub, expires: 2027-01-31 10:00:00}}
"""
    app, day, moment, quoted, naive = keys_of(text)
    assert app == Key("app", DIGEST, "paid")
    assert day.expires == quoted.expires == datetime(2027, 2, 1, tzinfo=UTC).timestamp()
    assert moment.expires == naive.expires == datetime(2027, 1, 31, 10, tzinfo=UTC).timestamp()


def test_a_configuration_without_keys_has_none():
    assert keys_of("") == ()
    assert keys_of("keys: []") == ()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{name: app, tier: paid}", "needs `sha256`"),
        (f"{{name: app, sha256: {DIGEST}, tier: gold}}", "'gold' is none of"),
        (f"{{name: app, sha256: {DIGEST}, tier: paid, expire: 2027-01-31}}", "did you mean `expires`"),
        (f"{{name: operator, sha256: {DIGEST}, tier: paid}}", "another kind of caller"),
        (f"{{name: app, sha256: {DIGEST}, tier: paid, expires: soon}}", "Invalid isoformat"),
        (f"{{name: app, sha256: {DIGEST}, tier: paid, expires: 12}}", "is no day"),
    ],
)
def test_a_bad_key_of_the_configuration_is_told_with_its_line(entry, says):
    with pytest.raises(ConfigError, match=says) as caught:
        keys_of(f"keys:\n  - {entry}\n")
    assert [fault.line for fault in caught.value.faults] == [2]


def test_a_key_put_where_its_digest_belongs_is_not_repeated_in_the_error():
    with pytest.raises(ConfigError, match="is no SHA-256") as caught:
        keys_of("keys: [{name: app, sha256: om-hunter2, tier: paid}]")
    assert "hunter2" not in str(caught.value)


def test_two_keys_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="another key 'app'"):
        keys_of(f"keys:\n  - &k {{name: app, sha256: {DIGEST}, tier: paid}}\n  - *k\n")


def test_the_keys_of_the_example_in_the_documentation_are_good():
    file = Path(__file__).resolve().parents[3] / "docs" / "omniserve.example.yaml"
    assert [(key.name, key.tier) for key in keyring.keys_in(read(file))] == [("batch-jobs", "background")]
