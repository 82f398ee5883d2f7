"""The containers' first step makes one key, once, and only where one is wanted."""

import pytest

from deploy.docker import setup
from deploy.edge_settings import EdgeSettings
from services.kit import keyring
from services.kit.keyring import Key, keyring_path


def settings(folder, **more):
    return EdgeSettings(state_dir=folder, published_bind="127.0.0.1", **more)


def test_the_first_start_makes_a_key_that_only_its_owner_reads_and_later_starts_keep_it(tmp_path):
    file = setup.ensure_key(settings(tmp_path), now=1.0)
    text = file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600
    (key,) = keyring.read(keyring_path(tmp_path))
    assert (key.name, key.sha256, key.tier) == ("first", keyring.digest(text), "paid")
    assert setup.ensure_key(settings(tmp_path), now=2.0) == file
    assert file.read_text().strip() == text
    assert keyring.read(keyring_path(tmp_path)) == (key,)


@pytest.mark.parametrize("more", [{"allow_anonymous": True}, {"secret": "shared"}])
def test_no_key_is_made_where_none_is_wanted(tmp_path, more):
    assert setup.ensure_key(settings(tmp_path, **more), now=1.0) is None
    assert keyring.read(keyring_path(tmp_path)) == ()


def test_keys_that_are_there_already_are_enough(tmp_path):
    config = tmp_path / "omniserve.yaml"
    config.write_text(f"keys: [{{name: ci, sha256: '{keyring.digest('x')}', tier: free}}]\n")
    assert setup.ensure_key(settings(tmp_path, config=config), now=1.0) is None
    own = Key("mine", keyring.digest("y"), "free", created=1.0, revoked=2.0)
    keyring.add(keyring_path(tmp_path), own, now=0.0)
    assert setup.ensure_key(settings(tmp_path), now=3.0) is None, "nor after the last one was revoked"


def test_a_file_that_cannot_be_read_ends_the_start_with_a_sentence(tmp_path, monkeypatch, capsys):
    keyring_path(tmp_path).write_text("{")
    monkeypatch.setenv("OMNISERVE_STATE_DIR", str(tmp_path))
    assert setup.main() == 1
    assert "is no keyring" in capsys.readouterr().err
